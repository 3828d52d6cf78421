"""Finds the differences between two runs, where their results diverge, and the likeliest cause."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.arguments import as_whole
from spmdtrain.lab.diff import FEW
from spmdtrain.lab.diff.causes import Cause, RunDifferences, causes
from spmdtrain.lab.diff.differences import (
    DataDifference,
    Other,
    ProgramDifference,
    code_differences,
    data_difference,
    place_differences,
    program_difference,
)
from spmdtrain.lab.diff.meaning import Changed, changed_settings
from spmdtrain.lab.diff.parting import Parting, Scale, first_difference, parting
from spmdtrain.lab.diff.sides import common_steps, read_run, side_at
from spmdtrain.lab.diff.speed import Speed, speed_of
from spmdtrain.models.choose import MakeModel, check_make

MOST_STEPS = 100_000


@dataclass(frozen=True)
class Compared:
    """The comparison of two runs, A and B.

    `settings` are those that differ, out of `of_settings`. `causes` has the likeliest first, and is
    empty if the runs are bit-equal. `hosts` are the machines of A and B.
    """

    a: str
    b: str
    settings: Sequence[Changed]
    of_settings: int
    code: Sequence[Other]
    devices: Sequence[Other]
    hosts: tuple[str | None, str | None]
    data: DataDifference
    program: ProgramDifference
    parting: Parting
    speed: Speed | None
    causes: Sequence[Cause]

    @property
    def verdict(self) -> str:
        """Identical, rounding, differ or, without a scale, unclear."""
        return self.parting.verdict

    def document(self) -> dict[str, Any]:
        """Returns the comparison as JSON values; an infinite figure is null."""
        document: dict[str, Any] = {"verdict": self.verdict} | asdict(self)
        where = document["parting"]
        for name in ("apart", "times"):
            if where[name] is not None and not math.isfinite(where[name]):
                where[name] = None
        return document


def diff(  # noqa: PLR0913 - a keyword for each part that a caller may replace
    a: str | Path,
    b: str | Path,
    *,
    replays: bool = True,
    steps: int = FEW,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    seams: Mapping[str, Any] | None = None,
    own: Sequence[str] = (),
) -> Compared:
    """Compares the run in directory `b` with that in `a`.

    If their figures are not bit-equal, A is replayed with slightly perturbed weights for `steps`
    steps after the first difference, which shows how far rounding goes. With `replays=False` only
    files are read. `make`, `devices`, `seams` and `own` are what the replay of A needs, see
    `replay`. Raises CheckpointError if one is not a run, or if they have no step in common.
    """
    check_make(make)
    steps = as_whole(steps, "steps", 1, MOST_STEPS)
    runs = read_run(a, "a"), read_run(b, "b")
    common = common_steps(*runs)
    first = first_difference(*runs, common)
    then, now = (side_at(run, first[0] if first else common[-1]) for run in runs)
    data = data_difference(then, now, common)
    is_same = data.step is None and (data.corpus is True or data.hashed == len(common))
    settings, count = changed_settings(then.config, now.config, is_same)
    code, places = code_differences(then, now), place_differences(then, now)
    program = program_difference(then, now)
    scale = Scale(replays, steps, make, devices, seams, own)
    apart = parting(*runs, common, data.step, scale)
    differences = RunDifferences(settings, code, places, data)
    return Compared(
        a=str(then.run),
        b=str(now.run),
        settings=settings,
        of_settings=count,
        code=code,
        devices=places,
        hosts=(then.start.get("host"), now.start.get("host")),
        data=data,
        program=program,
        parting=apart,
        speed=speed_of(*runs, program.same),
        causes=causes(differences, apart, common[0]),
    )
