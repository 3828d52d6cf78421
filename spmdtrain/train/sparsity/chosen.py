"""Chooses the matrices of a model that [sparsity] makes sparse."""

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel, Parameter
from spmdtrain.train.updates.parameter_kinds import is_matrix, is_table


def sparse_parameters(
    config: RunConfig,
    model: AbstractModel,
    sizes: Mapping[str, int],  # noqa: ARG001
) -> dict[str, Parameter]:
    """Returns the matrices that are sparse, by path, the same on any mesh; none without [sparsity].

    Raises ConfigError if a pattern names something else, or if N:M does not divide a matrix.
    """
    settings = config.sparsity
    if settings.pattern == "none":
        return {}
    if settings.weights:
        paths = _named(settings.weights, model.parameters)
    else:
        paths = [p for p, x in model.parameters.items() if x.is_trained & x.is_of_matmuls]
    if not paths:
        raise ConfigError(
            f"sparsity.pattern={settings.pattern!r}: no trained weight of the model is one that "
            "only matmuls read",
            fix="--set sparsity.weights=PATTERN, a pattern of paths as `show` prints them",
        )
    if settings.group is not None:
        _check_groups(settings.pattern, settings.group[1], {p: model.parameters[p] for p in paths})
    return {path: model.parameters[path] for path in paths}


def input_dim(parameter: Parameter) -> int:
    """Returns the last dim over which a matmul sums: groups of N:M lie along it.

    It is the first one of a layer's tensor, unless the matrix leads from several dims back to the
    stream.
    """
    first, last = parameter.axes[parameter.apart], parameter.axes[-1]
    leads_back = last == "embed" and first != "embed"
    return len(parameter.shape) - 2 if leads_back else parameter.apart


def _named(patterns: tuple[str, ...], parameters: Mapping[str, Parameter]) -> list[str]:
    """Returns the paths that match a pattern, each of a trained matrix."""
    for pattern in patterns:
        matched = [path for path in parameters if fnmatchcase(path, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, list(parameters), 1, 0.3)
            raise ConfigError(
                f"sparsity.weights: no weight has the path {pattern!r}",
                fix=f"a pattern of paths such as {(near or list(parameters))[0]}",
            )
        for path in matched:
            matrix = parameters[path]
            if not is_matrix(path, matrix) or is_table(matrix) or not matrix.is_trained:
                raise ConfigError(
                    f"sparsity.weights={pattern!r}: {path} is not a trained matrix of a layer",
                    fix="patterns of matrices, such as blocks.layer.mlp.*_??",
                )
    return [path for path in parameters if any(fnmatchcase(path, pattern) for pattern in patterns)]


def _check_groups(pattern: str, size: int, chosen: Mapping[str, Parameter]) -> None:
    """Refuses a matrix whose inputs do not divide into groups."""
    for path, parameter in chosen.items():
        inputs = parameter.shape[input_dim(parameter)]
        if inputs % size == 0:
            continue
        others = [p for p, x in chosen.items() if x.shape[input_dim(x)] % size == 0]
        fix = f"--set sparsity.weights={','.join(others)}, or " if others else ""
        raise ConfigError(
            f"sparsity.pattern={pattern!r}: {path} has {inputs} inputs in a row, which do not "
            f"divide by {size}",
            fix=f"{fix}--set sparsity.pattern=magnitude",
        )
