"""Settles what a run needs before any model exists: arguments, data, vocabulary and mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import jax

from spmdtrain.config.arguments import as_flag, as_run, as_step, check_kind
from spmdtrain.config.own_parts import own_list, with_own_parts
from spmdtrain.config.run_files import newest_step
from spmdtrain.config.schema import RunConfig, check_config
from spmdtrain.data.source import Data, open_data
from spmdtrain.models.choose import check_make
from spmdtrain.parallel.mesh import checked_devices
from spmdtrain.processes import clocks, pulse
from spmdtrain.running.report import stages
from spmdtrain.running.report.reporter import Hook, check
from spmdtrain.running.report.sinks import MakeSink
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.start.agreement import check_start
from spmdtrain.running.start.chosen_step import check_chosen

if TYPE_CHECKING:
    from spmdtrain.running.start.elastic import Adapted


@dataclass(frozen=True)
class Prepared:
    """The data, config and directory of a run that is about to start.

    `config` is the one to train with: it has the vocabulary of `data` and a mesh that fits the
    devices (`adapted` explains how, if it is not the one that was asked for). `seams` holds the
    parts that the caller or [own] replaced, by keyword; `sinks` and `hooks` are those of [own],
    then those of the caller. With `fresh`, an older run in `directory` is set aside; with `step`,
    the run goes back to the checkpoint of that step. `devices` are those of the caller, None for
    all. It was launched at the time `launched`.
    """

    directory: Path
    config: RunConfig
    data: Data
    adapted: "Adapted | None"
    seams: Mapping[str, Any]
    sinks: Sequence[MakeSink]
    hooks: Sequence[Hook]
    devices: Sequence[jax.Device] | None
    fresh: bool
    step: int | None
    launched: float

    @property
    def chooses(self) -> bool:
        """True if the user has chosen where the run starts: from scratch, or at a step."""
        return self.fresh or self.step is not None

    @property
    def is_new(self) -> bool:
        """True if nothing in the directory is resumed."""
        return self.fresh or newest_step(self.directory) is None


def check_arguments(
    config: Any, make: Any, prediction: Any, sinks: Sequence[Any], hooks: Sequence[Any]
) -> None:
    """Raises ConfigError if an argument of `run` is of the wrong kind."""
    check_config(config)
    check_make(make)
    check_kind(prediction, (Prediction, NoneType), "prediction", "None")
    check(sinks, hooks)


def prepare(
    config: RunConfig,
    directory: Any,
    devices: Any,
    seams: Mapping[str, Any],
    *,
    sinks: Sequence[MakeSink] = (),
    hooks: Sequence[Hook] = (),
    fresh: Any = False,
    step: Any = None,
) -> Prepared:
    """Opens the data and fits the mesh to `devices` (default: all).

    Raises ConfigError if `directory`, `devices`, `fresh` or `step` is of the wrong kind. Raises
    UserError if settings, data or `step` are wrong, or if the processes disagree about them.
    """
    directory, fresh, step = as_run(directory, "directory"), as_flag(fresh, "fresh"), as_step(step)
    devices = None if devices is None else checked_devices(devices)
    sinks = [*own_list(config, "sinks"), *sinks]
    hooks = [*own_list(config, "hooks"), *hooks]
    pulse.tell(pulse.BEGIN)
    launched = clocks.launched()
    stages.enter("opening the data")
    ready, data = open_data(config, seams["data"])
    seams = with_own_parts(ready, seams)
    check_start(config, data, seams, directory, fresh, step)
    if step is not None:
        check_chosen(directory, step, ready, fresh)
    adapted = None
    if not fresh and newest_step(directory) is not None:
        from spmdtrain.running.start.elastic import adapt

        adapted = adapt(ready, directory, devices)
    return Prepared(
        directory=directory,
        config=adapted.config if adapted else ready,
        data=data,
        adapted=adapted,
        seams=seams,
        sinks=sinks,
        hooks=hooks,
        devices=devices,
        fresh=fresh,
        step=step,
        launched=launched,
    )
