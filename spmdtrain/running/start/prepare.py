"""Settles what a run needs before any model exists: data, vocabulary and mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.own_parts import with_own_parts
from spmdtrain.config.run_files import newest_step
from spmdtrain.config.schema import RunConfig
from spmdtrain.data.source import Data, Source, Tokens, open_data
from spmdtrain.processes import clocks, pulse
from spmdtrain.running.report import stages
from spmdtrain.running.start.agreement import check_start
from spmdtrain.running.start.chosen_step import check_chosen
from spmdtrain.running.start.elastic import Adapted, adapt


@dataclass(frozen=True)
class Prepared:
    """The data, config and directory of a run that is about to start.

    `config` is the one to train with: it has the vocabulary of `data` and a mesh that fits the
    devices (`adapted` explains how). `seams` holds what the caller or [own] replaced, by keyword.
    With `fresh`, an older run in `directory` is set aside; with `step`, the run goes back to the
    checkpoint of that step. It was launched at the time `launched`.
    """

    directory: Path
    config: RunConfig
    data: Data
    adapted: Adapted
    seams: Mapping[str, Any]
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


def prepare(
    asked: RunConfig,
    directory: Path,
    devices: Sequence[jax.Device] | None,
    seams: Mapping[str, Source | Tokens | Any],
    fresh: bool,
    step: int | None,
) -> Prepared:
    """Opens the data and fits the mesh to `devices` (default: all).

    Raises UserError if settings, data or `step` are wrong, or if the processes disagree about them.
    """
    pulse.tell(pulse.BEGIN)
    launched = clocks.launched()
    stages.enter("opening the data")
    config, data = open_data(asked, seams["data"])
    seams = with_own_parts(config, seams)
    check_start(asked, data, seams, directory, fresh, step)
    check_chosen(directory, step, config, fresh)
    adapted = adapt(config, directory, devices, fresh)
    return Prepared(directory, adapted.config, data, adapted, seams, fresh, step, launched)
