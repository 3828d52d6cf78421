"""Marks the weights that [precision] multiplies in 8-bit floats, while the model is built."""

import difflib
from fnmatch import fnmatchcase

from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import PrecisionConfig
from spmdtrain.models.adapters.adapted import is_of_adapter
from spmdtrain.models.projection import Float8Weight, matmul_weights


def narrow(model: nnx.Module, precision: PrecisionConfig) -> None:
    """Puts a `Float8Weight` in place of each `MatmulWeight` that `precision.wide` does not name.

    Adapters are not narrowed: they are small, and learn from small differences.

    Raises ConfigError if a pattern of `precision.wide` names no weight, or if none is left.
    """
    if precision.matmul != "float8":
        return
    found = {
        path: (module, name)
        for path, module, name in matmul_weights(model)
        if not is_of_adapter(getattr(module, name))
    }
    _check(precision, found)
    for path, (module, name) in found.items():
        if not any(fnmatchcase(path, pattern) for pattern in precision.wide):
            weight = getattr(module, name)
            setattr(module, name, Float8Weight(weight[...], **weight.get_metadata()))


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
            "precision.matmul='float8' narrows no matmul of this model",
            found=f"precision.wide={','.join(precision.wide)}" if paths else "no MatmulWeight",
            fix="--set precision.matmul=compute",
        )
