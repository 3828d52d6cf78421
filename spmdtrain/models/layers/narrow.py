"""Replaces the weights that [precision] multiplies in 8-bit floats, while the model is built."""

import difflib
import math
from fnmatch import fnmatchcase

from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import PrecisionConfig
from spmdtrain.models.projection import MatmulWeight, is_added, matmul_weights
from spmdtrain.parallel.axes import Rules, axes_of_dim
from spmdtrain.parallel.matmuls.mxfp8 import BLOCK


class Float8Weight(MatmulWeight):
    """A `MatmulWeight` that is multiplied in 8-bit floats with one scale for an array."""

    narrow = "float8"


class BlockWeight(MatmulWeight):
    """A `MatmulWeight` that is multiplied in 8-bit floats with a scale for each block."""

    narrow = "mxfp8"


KINDS = {"float8": Float8Weight, "mxfp8": BlockWeight}


def narrow(model: nnx.Module, precision: PrecisionConfig) -> None:
    """Replaces each `MatmulWeight` that `precision.wide` does not name by a narrow weight.

    What was added to a weight is not narrowed: it is small, and learns from small differences.

    Raises ConfigError if a pattern of `precision.wide` names no weight, or if none is narrowed.
    """
    assert precision.matmul != "compute", "the settings name a format"
    kind = KINDS[precision.matmul]
    weights = {
        path: (module, name)
        for path, module, name in matmul_weights(model)
        if not is_added(getattr(module, name))
    }
    _check(precision, weights)
    for path, (module, name) in weights.items():
        if not any(fnmatchcase(path, pattern) for pattern in precision.wide):
            weight = getattr(module, name)
            setattr(module, name, kind(weight[...], **weight.get_metadata()))


def _check(precision: PrecisionConfig, paths: dict) -> None:
    for pattern in precision.wide:
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, 1, 0.3) or list(paths)[:1]
            raise ConfigError(
                f"precision.wide: no weight that only matmuls read has the path {pattern!r}",
                found=", ".join(paths) or "none",
                fix=f"--set precision.wide={near[0]}" if near else "--set precision.wide=",
            )
    if all(any(fnmatchcase(path, pattern) for pattern in precision.wide) for path in paths):
        raise ConfigError(
            f"precision.matmul={precision.matmul!r} narrows no matmul of this model",
            found=f"precision.wide={','.join(precision.wide)}" if paths else "no MatmulWeight",
            fix="--set precision.matmul=compute",
        )


def check_blocks(model: nnx.Module, rules: Rules, sequences: int, tokens: int) -> None:
    """Raises ConfigError if a device's part of a contracted dim is not a whole number of blocks.

    Every dim of a matmul is contracted once: the tokens and the outputs are by the gradients.
    `sequences`: of a microbatch on all devices; `tokens`: of a sequence.
    """
    weights = [
        (path, getattr(module, name))
        for path, module, name in matmul_weights(model)
        if isinstance(getattr(module, name), BlockWeight)
    ]
    if not weights:
        return
    (batch, time) = rules.activation_spec(("batch", "time"), (sequences, tokens))
    on_device = sequences * tokens // _ways(rules, batch, time)
    if on_device % BLOCK:
        raise ConfigError(
            "precision.matmul='mxfp8': the tokens of a microbatch on a device are no multiple of "
            f"{BLOCK}",
            found=f"{on_device} tokens",
            fix="another train.microbatch or train.sequence_length",
        )
    for path, weight in weights:
        for what, size in _contracted(weight, rules).items():
            if size % BLOCK:
                raise ConfigError(
                    f"precision.matmul='mxfp8': {path} has {size} {what} on a device, no "
                    f"multiple of {BLOCK}",
                    fix=f"--set precision.wide={path}",
                )


def _contracted(weight: nnx.Variable, rules: Rules) -> dict[str, int]:
    """Returns how many rows and columns of a weight a device multiplies."""
    dims = [
        (name, size)
        for name, size in zip(weight.out_sharding, weight.shape, strict=True)
        if name != "layer"
    ]
    back_to_stream = dims[-1][0] == "embed" and dims[0][0] != "embed"
    stream = dims.pop(-1 if back_to_stream else 0)[1]
    names, shape = zip(*dims, strict=True)
    ways = _ways(rules, *rules.activation_spec(names, shape))
    wide = math.prod(shape) // ways
    rows, columns = (wide, stream) if back_to_stream else (stream, wide)
    return {"rows": rows, "columns": columns}


def _ways(rules: Rules, *dims) -> int:
    """Returns the devices among which the dims of a spec are split."""
    return math.prod(rules.sizes[axis] for dim in dims for axis in axes_of_dim(dim))
