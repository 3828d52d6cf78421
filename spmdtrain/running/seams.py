"""The types of what a caller of `run` may replace, in one place.

Each has an example in examples/seams.
"""

from spmdtrain.data.source import Source, Tokens
from spmdtrain.models.choose import MakeModel
from spmdtrain.running.report.reporter import Hook
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.train.state import TrainState
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates.learning_rates import LearningRate
from spmdtrain.train.updates.optimizers import Optimizer

__all__ = [
    "Hook",
    "MakeModel",
    "MakeSink",
    "Optimizer",
    "LearningRate",
    "Source",
    "TokenLoss",
    "Tokens",
    "TrainState",
]
