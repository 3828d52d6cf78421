"""How an executor walks a table: runs of ticks with the same kinds of work, and what of them repeats, folded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from spmdtrain.parallel.pipeline.schedule import WORK, Table, arriving_backward, arriving_forward

MOST_PHASES = 12  # that an executor compiles; the schedules built here have five at most


@dataclass(frozen=True)
class Phase:
    """A run of ticks [start, stop) in which the same kinds of work are present on some stage.

    `embed` to `embed_backward` say that some tick of the run has one: they do not split phases.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool
    embed: bool
    head: bool
    arrive_forward: bool
    arrive_backward: bool
    embed_backward: bool

    @property
    def flags(self) -> tuple[bool, ...]:
        return tuple(getattr(self, field.name) for field in fields(self)[2:])


@dataclass(frozen=True)
class Round:
    """Phases that run one after the other, `repeats` times over: all repeats have the same lengths and kinds of work.

    `phases` are those of the first time, with what any of the repeats has of embed and arrivals.
    """

    phases: tuple[Phase, ...]
    repeats: int

    @property
    def ticks(self) -> int:
        """Of one repeat."""
        return self.phases[-1].stop - self.phases[0].start


def phases(table: Table) -> tuple[Phase, ...]:
    """Maximal runs of ticks with the same kinds of work present on any stage: fill, steady, drain and the like."""
    return _runs(table, _kinds(table))


def rounds(table: Table) -> tuple[Round, ...]:
    """The phases as an executor scans them. They are cut where the head starts or stops as well, because its work is
    too dear to be done for nothing, and what repeats is folded: the number of rounds does not grow with that of
    microbatches. A table without such order is one phase in which every tick has every kind of work.
    """
    runs = _runs(table, np.concatenate([_kinds(table), table.head_microbatch[:, None] >= 0], axis=1))
    folded = tuple(_folded(runs))
    if sum(len(each.phases) for each in folded) <= MOST_PHASES:
        return folded
    whole = Phase(0, table.ticks, *(any(flags) for flags in zip(*(run.flags for run in runs), strict=True)))
    return (Round((whole,), 1),)


def _kinds(table: Table) -> np.ndarray:
    """[ticks, kinds of work]: whether some stage has one."""
    return np.stack([(getattr(table, f"{kind}_microbatch") >= 0).any(1) for kind in WORK], axis=1)


def _runs(table: Table, same: np.ndarray) -> tuple[Phase, ...]:
    """Maximal runs of ticks with the same row of `same` [ticks, n]."""
    starts = [0, *(np.flatnonzero((same[1:] != same[:-1]).any(1)) + 1).tolist()]
    sometimes = np.stack(
        [
            table.embed_microbatch >= 0,
            table.head_microbatch >= 0,
            (arriving_forward(table)[..., 0] >= 0).any(1),
            (arriving_backward(table)[..., 0] >= 0).any(1),
            table.embed_backward_microbatch >= 0,
        ],
        axis=1,
    )
    kinds = _kinds(table)
    return tuple(
        Phase(start, stop, *kinds[start].tolist(), *sometimes[start:stop].any(0).tolist())
        for start, stop in zip(starts, [*starts[1:], table.ticks], strict=True)
    )


def _folded(runs: Sequence[Phase]) -> Iterator[Round]:
    """At each place the repetition that covers most, the shortest first."""
    cut = [(run.forward, run.backward, run.weight, run.head, run.stop - run.start) for run in runs]
    at = 0
    while at < len(runs):
        best = (1, 1)
        for period in range(1, (len(runs) - at) // 2 + 1):
            repeats = 1
            while cut[at + repeats * period :][:period] == cut[at : at + period]:
                repeats += 1
            if repeats > 1 and repeats * period > best[0] * best[1]:
                best = (period, repeats)
        period, repeats = best
        phases = []
        for first in range(at, at + period):
            alike = [run.flags for run in runs[first : at + period * repeats : period]]
            phases.append(
                Phase(runs[first].start, runs[first].stop, *(any(flags) for flags in zip(*alike, strict=True)))
            )
        yield Round(tuple(phases), repeats)
        at += period * repeats
