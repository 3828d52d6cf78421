"""Defines arrays of a model that are not trained."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax import nnx

from spmdtrain.config.errors import ConfigError


class Buffer(nnx.Variable):
    """An array of a model that is not trained: random features, a fixed table.

    It is made like a parameter, `Buffer(x, out_sharding=("embed", "ffn"))`, and is stored on the
    mesh and in checkpoints like one; optimizers skip it, and it has no moments. It keeps the
    floating values with which the model was made: a forward pass that changes them is refused.
    """


@contextlib.contextmanager
def refusing_writes(module: nnx.Module) -> Iterator[None]:
    """Returns a context for tracing a part of the forward pass.

    Raises ConfigError if it changes an array. The change would be lost: a step keeps only what its
    optimizer changes.
    """
    before = _arrays(module)
    yield
    for path, array in _arrays(module).items():
        if path in before and before[path] is not array:
            raise ConfigError(
                f"a forward pass changes {path} of a {type(module).__name__}, which no step keeps",
                fix="nnx.Param for what is learned, or a norm without running statistics",
            )


def _arrays(module: nnx.Module) -> dict[str, Any]:
    """Returns the arrays of a module's parameters and buffers, by dotted path."""
    flat = nnx.to_flat_state(nnx.state(module, (nnx.Param, Buffer)))
    return {".".join(map(str, path)): variable.get_raw_value() for path, variable in flat}
