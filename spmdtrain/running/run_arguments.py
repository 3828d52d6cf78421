"""Checks the arguments of a run, before anything is read or written."""

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from spmdtrain.config.given import as_flag, as_run, as_step, check_kind
from spmdtrain.config.own_parts import own_list
from spmdtrain.config.schema import check_config
from spmdtrain.models.choose import check_make
from spmdtrain.parallel.mesh import given_devices
from spmdtrain.running.report.reporter import Hook, check
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.report.summary import Prediction


class Where(NamedTuple):
    """The place of a run: its directory, its starting step, its devices, and who hears of it.

    `sinks` and `hooks` are those that [own] names, then those of the caller.
    """

    directory: Path
    fresh: bool
    step: int | None
    devices: list[Any] | None
    sinks: list[MakeSink]
    hooks: list[Hook]


def check_arguments(  # noqa: PLR0913 - those of `run`
    config: Any,
    directory: Any,
    fresh: Any,
    step: Any,
    make: Any,
    devices: Any,
    prediction: Any,
    sinks: Sequence[Any],
    hooks: Sequence[Any],
) -> Where:
    """Returns the place of a run. Raises ConfigError if an argument of `run` is unusable."""
    check_config(config)
    check_make(make)
    check_kind(prediction, (Prediction, NoneType), "prediction", "None")
    check(sinks, hooks)
    return Where(
        as_run(directory, "directory"),
        as_flag(fresh, "fresh"),
        as_step(step),
        None if devices is None else given_devices(devices),
        [*own_list(config, "sinks"), *sinks],
        [*own_list(config, "hooks"), *hooks],
    )
