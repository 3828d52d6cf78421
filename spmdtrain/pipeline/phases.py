"""Splits a table's ticks into phases, which an executor scans, and folds those that repeat.

A scan has one body for all its ticks, so a phase is a run of ticks with the same kinds of work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from spmdtrain.pipeline.schedule import WORK, Table, arriving_backward, arriving_forward

MOST_PHASES = 12  # compiled by an executor; the schedules built here have five at most


@dataclass(frozen=True)
class Phase:
    """A run of ticks [start, stop) in which the same kinds of work are present on some stage.

    The flags `forward`, `backward` and `weight` hold for every tick of the run. The flags from
    `enter` on say that some tick of it has such an event, and do not split runs.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool
    enter: bool
    embed: bool
    head: bool
    arrive_forward: bool
    arrive_backward: bool
    embed_backward: bool

    @property
    def flags(self) -> tuple[bool, ...]:
        """The fields except `start` and `stop`, in order."""
        return tuple(getattr(self, field.name) for field in fields(self)[2:])


@dataclass(frozen=True)
class RepeatedPhases:
    """A sequence of phases that runs `repeats` times.

    All repeats have phases of the same lengths with the same kinds of work. `phases` are the
    phases of the first repeat, with every flag that any repeat has.
    """

    phases: tuple[Phase, ...]
    repeats: int

    @property
    def ticks(self) -> int:
        """The ticks of one repeat."""
        return self.phases[-1].stop - self.phases[0].start


def phases(table: Table) -> tuple[Phase, ...]:
    """Returns the longest runs of ticks with the same kinds of work, e.g. fill, steady, drain."""
    return _split_runs(table, _kinds_of_work(table))


def rounds(table: Table) -> tuple[RepeatedPhases, ...]:
    """Returns the phases as an executor scans them: cut further, then folded.

    Phases are also cut where the head starts or stops, because its work is too expensive to be done
    and masked. Repeating phases are folded, so the number of rounds does not grow with the number
    of microbatches. A table too irregular for that (more than MOST_PHASES) becomes one phase, in
    which every tick does every kind of work.
    """
    head = table.head_microbatch[:, None] >= 0
    runs = _split_runs(table, np.concatenate([_kinds_of_work(table), head], axis=1))
    folded = tuple(_fold(runs))
    if sum(len(repeated.phases) for repeated in folded) <= MOST_PHASES:
        return folded
    # Cells without work are masked, so a tick may do every kind of work; it only takes longer.
    whole = Phase(0, table.ticks, *_any_flags(runs))
    return (RepeatedPhases((whole,), repeats=1),)


def _kinds_of_work(table: Table) -> np.ndarray:
    """Returns [ticks, kinds of work]: whether some stage has such work at this tick."""
    present = [(getattr(table, f"{kind}_microbatch") >= 0).any(1) for kind in WORK]
    return np.stack(present, axis=1)


def _split_runs(table: Table, same: np.ndarray) -> tuple[Phase, ...]:
    """Returns the longest runs of ticks with equal rows in `same` [ticks, n]."""
    changes = (same[1:] != same[:-1]).any(1)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    stops = [*starts[1:], table.ticks]
    kinds = _kinds_of_work(table)
    events = np.stack(  # in the order of Phase's fields
        [
            table.entering_microbatch >= 0,
            table.embed_microbatch >= 0,
            table.head_microbatch >= 0,
            (arriving_forward(table)[..., 0] >= 0).any(1),
            (arriving_backward(table)[..., 0] >= 0).any(1),
            table.embed_backward_microbatch >= 0,
        ],
        axis=1,
    )
    return tuple(
        Phase(start, stop, *kinds[start].tolist(), *events[start:stop].any(0).tolist())
        for start, stop in zip(starts, stops, strict=True)
    )


def _fold(runs: Sequence[Phase]) -> Iterator[RepeatedPhases]:
    """Folds runs that repeat.

    This is greedy: at each run it takes the repetition that covers the most runs, and among equals
    the one with the shortest period.
    """
    alike = [
        (run.forward, run.backward, run.weight, run.head, run.stop - run.start) for run in runs
    ]
    # Microbatches change from one repeat to the next, but they are data: a scan compiles the same
    # if the kinds of work, the head and the lengths are the same.
    at = 0
    while at < len(runs):
        best_period = 1
        best_repeats = 1
        for period in range(1, (len(runs) - at) // 2 + 1):
            repeats = 1
            while alike[at + repeats * period :][:period] == alike[at : at + period]:
                repeats += 1
            if repeats > 1 and repeats * period > best_period * best_repeats:
                best_period = period
                best_repeats = repeats
        end = at + best_period * best_repeats
        folded = []
        for first in range(at, at + best_period):
            flags = _any_flags(runs[first:end:best_period])
            folded.append(Phase(runs[first].start, runs[first].stop, *flags))
        yield RepeatedPhases(tuple(folded), best_repeats)
        at = end


def _any_flags(runs: Sequence[Phase]) -> tuple[bool, ...]:
    """Returns the flags that any of these runs has."""
    return tuple(any(flags) for flags in zip(*(run.flags for run in runs), strict=True))
