"""Finds the setting that gives a dim of a weight a size that the mesh divides."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from spmdtrain.config.errors import UserError
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import build_model
from spmdtrain.models.choose import MakeModel, choose_model
from spmdtrain.parallel.axes import IndivisibleError

MOST_TRIED = 12  # models that are traced; each takes a tenth of a second
NO_SIZE = "layers"  # not to be changed for the sake of what all of them hold
OF_A_FILE = "config.json"  # which gives the sizes of weights that exist


def propose_size(
    error: IndivisibleError, config: RunConfig, make: MakeModel | str | None, stages: int
) -> None:
    """Adds to the remedy of an error the setting of [model] that mends it, if there is one.

    Each candidate is tried: the dim of the model with that setting must divide. Sizes of weights
    that a run begins with are not up to it, so there the remedy is to keep the dim whole.
    """
    if config.train.init_from or _is_of_a_file(config):
        error.propose(error.whole)
        return
    for setting, value in list(_candidates(error, config))[:MOST_TRIED]:
        if (size := _size_with(f"{setting}={value}", error, config, make, stages)) is not None:
            error.propose(f"{error.axis} = {size} (--set {setting}={value}), or {error.whole}")
            return


def _is_of_a_file(config: RunConfig) -> bool:
    """Returns True if the width of the model is that of a published folder or a run."""
    return config.origin.get("model.embed", "").endswith(OF_A_FILE)


def _candidates(error: IndivisibleError, config: RunConfig) -> list[tuple[str, int]]:
    """Returns settings with a larger value each, the most likely first."""
    found = []
    for setting, value in _sizes(config.model.model_dump(mode="json"), "model."):
        if error.size % value == 0:
            times = error.size // value
            step = error.ways // math.gcd(times, error.ways)
            is_named_so = setting.endswith(f".{error.axis}")
            found.append((not is_named_so, times, setting, (value // step + 1) * step))
    return [(setting, larger) for *_, setting, larger in sorted(found)]


def _sizes(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{prefix}{name}.")
        elif type(value) is int and value > 0 and name != NO_SIZE:
            yield prefix + name, value


def _size_with(
    setting: str,
    error: IndivisibleError,
    config: RunConfig,
    make: MakeModel | str | None,
    stages: int,
) -> int | None:
    """Returns the size of the dim in the model with a setting; None if that does not divide."""
    try:
        changed, chosen = choose_model(from_resolved(resolved(config), [setting]), make)
        model = build_model(changed, chosen, stages, config.pipeline.chunks)
    except UserError:
        return None
    size = model.parameters[error.at].shape[error.dim] if error.at in model.parameters else 1
    return None if size % error.ways or size <= error.size else size
