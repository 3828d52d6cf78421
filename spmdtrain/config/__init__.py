"""The settings of a run. Nothing here imports jax.

schema/ has the classes that hold them, load.py fills them from files and the command line, and
errors.py has the errors that a person sees.
"""

from spmdtrain.config import schema
from spmdtrain.config.errors import (
    DONE,
    PREEMPTED,
    REFUSED,
    UNEQUAL,
    CheckpointError,
    ConfigError,
    CorruptedError,
    DamagedError,
    DataError,
    DivergedError,
    HangError,
    OwnCodeError,
    PeerLostError,
    StorageError,
    UnfitError,
    UserError,
)
from spmdtrain.config.load import from_resolved, json_schema, load, resolved, to_toml
from spmdtrain.config.schema import *  # noqa: F403 - the sections, which are listed there

__all__ = [
    "DONE",
    "PREEMPTED",
    "REFUSED",
    "CheckpointError",
    "ConfigError",
    "CorruptedError",
    "DamagedError",
    "DataError",
    "DivergedError",
    "HangError",
    "OwnCodeError",
    "PeerLostError",
    "StorageError",
    "UNEQUAL",
    "UnfitError",
    "UserError",
    "from_resolved",
    "json_schema",
    "load",
    "resolved",
    "to_toml",
]
__all__ += schema.__all__
