"""The settings of a run. Nothing here imports jax.

schema.py has the classes that hold them, load.py fills them from files and from the command line,
and errors.py has the errors that a person sees.
"""

from spmdtrain.config.errors import (
    DONE,
    PREEMPTED,
    CheckpointError,
    ConfigError,
    DataError,
    PeerLostError,
    StorageError,
    UserError,
)
from spmdtrain.config.load import from_resolved, json_schema, load, resolved, to_toml
from spmdtrain.config.schema import (
    GPT,
    AdamW,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    Lion,
    Llama,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RulesConfig,
    RunConfig,
    Sgd,
    TrainConfig,
    TransformerConfig,
)

__all__ = [
    "GPT",
    "DONE",
    "PREEMPTED",
    "AdamW",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EvalConfig",
    "Lion",
    "Llama",
    "LogConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PeerLostError",
    "PipelineConfig",
    "PrecisionConfig",
    "RulesConfig",
    "RunConfig",
    "Sgd",
    "StorageError",
    "TrainConfig",
    "TransformerConfig",
    "UserError",
    "from_resolved",
    "json_schema",
    "load",
    "resolved",
    "to_toml",
]
