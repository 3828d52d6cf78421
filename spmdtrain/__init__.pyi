"""The public names of `spmdtrain`, and where each lives: `__init__.py` imports them lazily."""

from .config import RunConfig as RunConfig
from .config import UserError as UserError
from .config import load as load
from .data.source import Source as Source
from .data.source import open_data as open_data
from .models.buffer import Buffer as Buffer
from .models.context import ForwardContext as ForwardContext
from .models.stack import Stack as Stack
from .models.transformer import Transformer as Transformer
from .parallel.processes import simulate_devices as simulate_devices
from .parallel.xla_flags import set_xla_flags as set_xla_flags
from .planner.estimate import estimate as estimate
from .planner.plan import plan as plan
from .running.evaluate import evaluate as evaluate
from .running.loop import Outcome as Outcome
from .running.loop import batches as batches
from .running.loop import run as run
from .running.opened import OpenedRun as OpenedRun
from .running.opened import open_run as open_run
from .running.restore import restore as restore
from .running.restore import run_config as run_config
from .running.restore import weights as weights
from .running.sample import Choice as Choice
from .running.sample import generate as generate
from .running.sample import generate_ids as generate_ids
from .running.sample import make_logits as make_logits
from .running.save_state import save as save
from .train.differentiable import make_gradients as make_gradients
from .train.differentiable import make_loss as make_loss
from .train.evaluation import make_evaluate as make_evaluate
from .train.optimizers import Rule as Rule
from .train.setup import Setup as Setup
from .train.setup import init_state as init_state
from .train.setup import shard as shard
from .train.shipped_optimizers import make_optimizer as make_optimizer
from .train.state import TrainState as TrainState
from .train.step import make_eval_step as make_eval_step
from .train.step import make_step as make_step

__version__: str
