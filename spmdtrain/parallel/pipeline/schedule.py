"""Pipeline schedules as tables of numpy data: what every stage does at every tick, and in which slot things wait.

Words. A *stage* is a share of the devices; it holds `chunks` runs of layers, and layers pass chunk 0 of all stages,
then chunk 1 of all stages, and so on. A *unit* is one microbatch in one chunk of one stage; it has a forward, a
backward and, where backward is split, a weight gradient (then "backward" is the input gradient alone). All stages tick
together, and in one tick a stage runs at most one unit of each kind. A *slot* is a place in a ring buffer.

One tick, on every stage, in this order (this is all an executor must know):

1. What left the neighbours at the end of the last tick arrives: the activation from the stage before (stage 0: from
   the last stage, next chunk) goes into `stash[arrive_forward_slot]`, the cotangent from the stage behind into
   `cotangents[arrive_backward_slot]`. A hop is kept for this one tick only: what is used later waits in its slot.
2. The forward reads its input from `stash[forward_slot]` (stage 0, chunk 0: from the embedding) and leaves there what
   its backward needs.
3. The head runs for a last chunk's forward on the last stage; its cotangent goes into `cotangents[head_slot]`.
4. The backward reads `stash[backward_slot]` and `cotangents[cotangent_slot]`; if split, it leaves in
   `deferred[defer_slot]` what the weight gradient needs besides the stash.
5. The weight gradient reads `stash[weight_slot]` and `deferred[resume_slot]`.

A ring holds its slots and one more, the trash, whose index is the number of slots: cells without work, and arrivals
nobody waits for, write there, so that nothing need be selected. Where nothing in a whole table ever waits in a ring,
the executor needs none: `activations_wait` is False (forward inputs are used as they arrive), `cotangent_slots` is 0,
`deferred_slots` is 0. So it is in all schedules built here, but for the head's cotangents in GPipe and for what
zero_bubble defers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import get_args

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import PipelineSchedule

KINDS: tuple[str, ...] = get_args(PipelineSchedule)
WORK: tuple[str, ...] = ("forward", "backward", "weight")


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule; the arrays are int32 [ticks, stages], -1 for no unit, the trash index for no slot."""

    kind: str
    stages: int
    chunks: int
    microbatches: int
    forward_microbatch: np.ndarray
    forward_chunk: np.ndarray
    forward_slot: np.ndarray
    backward_microbatch: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    weight_microbatch: np.ndarray
    weight_chunk: np.ndarray
    weight_slot: np.ndarray
    arrive_forward_slot: np.ndarray
    arrive_backward_slot: np.ndarray
    head_slot: np.ndarray
    cotangent_slot: np.ndarray
    defer_slot: np.ndarray
    resume_slot: np.ndarray
    slots: int
    cotangent_slots: int
    deferred_slots: int
    peak_stash: tuple[int, ...]

    def __eq__(self, other):
        if not isinstance(other, Table):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    @property
    def ticks(self) -> int:
        return len(self.forward_microbatch)

    @property
    def split(self) -> bool:
        """Whether weight gradients are units of their own."""
        return bool((self.weight_microbatch >= 0).any())

    @property
    def activations_wait(self) -> bool:
        """Whether some activation arrives before the tick of its forward."""
        arrives, runs = self.arrive_forward_slot != self.slots, self.forward_microbatch >= 0
        runs[:, 0] &= self.forward_chunk[:, 0] != 0
        return not np.array_equal(arrives, runs)

    @property
    def embed_microbatch(self) -> np.ndarray:
        """[ticks]: whose embedding enters stage 0 at this tick, or -1."""
        return np.where(self.forward_chunk[:, 0] == 0, self.forward_microbatch[:, 0], -1)

    @property
    def embed_backward_microbatch(self) -> np.ndarray:
        """[ticks]: the cotangent of whose embedding leaves stage 0 at this tick, or -1."""
        return np.where(self.backward_chunk[:, 0] == 0, self.backward_microbatch[:, 0], -1)

    @property
    def head_microbatch(self) -> np.ndarray:
        """[ticks]: whose last activation leaves the last stage at this tick, or -1."""
        return np.where(self.forward_chunk[:, -1] == self.chunks - 1, self.forward_microbatch[:, -1], -1)


def build(kind: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """The schedule of that name."""
    if kind == "interleaved":
        return interleaved(stages, microbatches, chunks)
    if kind == "zero_bubble":
        return zero_bubble(stages, microbatches, chunks)
    if kind not in KINDS:
        raise ConfigError("unknown pipeline schedule", asked=repr(kind), fix=", ".join(KINDS))
    if chunks != 1:
        what = f"pipeline schedule {kind!r} has one chunk per stage"
        raise ConfigError(what, asked=f"chunks={chunks}", fix="'interleaved'")
    return gpipe(stages, microbatches) if kind == "gpipe" else one_f_one_b(stages, microbatches)


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards, last microbatch first (Huang et al., arXiv 1811.06965).

    2 (m + p - 1) ticks; the stash holds all m microbatches.
    """
    _positive(stages, microbatches, 1)
    ticks, unit = 2 * (microbatches + stages - 1), np.arange(microbatches)
    forward, backward, weight = (_idle(ticks, stages) for _ in WORK)
    for stage in range(stages):
        forward[stage + unit, stage] = np.stack([unit, 0 * unit], axis=1)
        backward[ticks // 2 + unit + stages - 1 - stage, stage] = np.stack([unit[::-1], 0 * unit], axis=1)
    return assign_slots("gpipe", microbatches, 1, forward, backward, weight)


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """1F1B, paired: `interleaved` with one chunk. Stage s stashes 2 (p - 1 - s) + 1 microbatches (unpaired: p - s)."""
    return _paired("1f1b", stages, microbatches, 1)


def interleaved(stages: int, microbatches: int, chunks: int) -> Table:
    """Interleaved 1F1B, paired (the bubble of Narayanan et al., arXiv 2104.04473: (p - 1) / (v m) of the ideal time).

    Forward work in m v + p - 1 ticks, backward work in as many, m v + v p + p - 2 ticks in all; stage s stashes
    (v - 1) p + 2 (p - 1 - s) + 1 chunks, or all m v if that is fewer.
    """
    return _paired("interleaved", stages, microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """`interleaved` with backward split (Qi et al., arXiv 2401.10241): weight gradients fill the drain.

    Backwards reach the stages one after the other; weight gradients are put off until all stages run the same one in
    the same tick, that of stage 0's backward. Then no tick holds one of them for some stages only, and of the three
    parts of the bubble (p - 1)(F + B + W) / v only (p - 1)(F + B) / v is left: the least that stages in lockstep can
    have. The largest stash does not grow: stage 0 puts nothing off.
    """
    return _paired("zero_bubble", stages, microbatches, chunks, split=True)


def _paired(kind: str, stages: int, microbatches: int, chunks: int, split: bool = False) -> Table:
    """Units in groups of p microbatches, chunk after chunk; forward k of stage s at tick s + k, backward k at
    v p - 1 + k + (p - 1 - s). So each hop is used exactly one tick later, and the last stage turns round within a tick.
    """
    _positive(stages, microbatches, chunks)
    if chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        raise ConfigError(
            "interleaving goes through microbatches in groups of one per stage",
            asked=f"microbatches={microbatches} with stages={stages}, chunks={chunks}",
            fix=" or ".join(f"microbatches={number}" for number in (below, below + stages) if number),
        )
    round_trip = chunks * stages
    unit = np.arange(microbatches * chunks)
    ticks = len(unit) + round_trip + stages - 2
    microbatch = unit // round_trip * stages + unit % stages
    chunk = unit % round_trip // stages
    forward, backward, weight = (_idle(ticks, stages) for _ in WORK)
    for stage in range(stages):
        forward[stage + unit, stage] = np.stack([microbatch, chunk], axis=1)
        last_first = np.stack([microbatch, chunks - 1 - chunk], axis=1)
        backward[round_trip - 1 + unit + stages - 1 - stage, stage] = last_first
        if split:
            weight[round_trip - 1 + unit + stages - 1, stage] = last_first
    return assign_slots(kind, microbatches, chunks, forward, backward, weight)


def assign_slots(
    kind: str,
    microbatches: int,
    chunks: int,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray,
    *,
    stash: np.ndarray | None = None,
) -> Table:
    """The table of these units, [ticks, stages, (microbatch, chunk)] each: every live span gets a slot, greedily.

    The units must obey the rules (`schedule_rules.check_units`). `stash`, [ticks, stages], sets the stash slots of the
    forwards by hand. Greedy colouring of spans by start uses as few slots as spans overlap, so it is the least.
    """
    stages, split = forward.shape[1], bool((weight >= 0).any())
    ran, returned = when(forward, microbatches, chunks), when(backward, microbatches, chunks)
    finished = when(weight, microbatches, chunks) if split else returned
    arrived, came_back = arrival_ticks(ran, returned)
    by_unit = _colour(arrived, finished) if stash is None else stash[ran, np.arange(stages)[:, None, None]]
    slots = int(by_unit.max()) + 1
    waits = bool((came_back < returned).any())
    back_by_unit = _colour(came_back, returned)
    cotangent_slots = int(back_by_unit.max()) + 1 if waits else 0
    deferred = split and bool((returned < finished).any())
    deferred_by_unit = _colour(returned, finished)
    deferred_slots = int(deferred_by_unit.max()) + 1 if deferred else 0

    def column(
        by_unit: np.ndarray, ticks_of_units: np.ndarray, trash: int, among: np.ndarray | bool = True
    ) -> np.ndarray:
        slot = np.full(forward.shape[:2], trash, np.int32)
        stage, microbatch, chunk = np.nonzero(np.broadcast_to(among, by_unit.shape))
        slot[ticks_of_units[stage, microbatch, chunk], stage] = by_unit[stage, microbatch, chunk]
        return slot

    enters = np.zeros(ran.shape, bool)
    enters[0, :, 0] = True
    leaves = np.zeros(ran.shape, bool)
    leaves[-1, :, -1] = True
    arrays = {
        "forward_slot": column(by_unit, ran, slots),
        "backward_slot": column(by_unit, returned, slots),
        "weight_slot": column(by_unit, finished, slots, split),
        "arrive_forward_slot": column(by_unit, arrived, slots, ~enters),
        "arrive_backward_slot": column(back_by_unit, came_back, cotangent_slots, ~leaves & waits),
        "head_slot": column(back_by_unit, came_back, cotangent_slots, leaves & waits),
        "cotangent_slot": column(back_by_unit, returned, cotangent_slots, waits),
        "defer_slot": column(deferred_by_unit, returned, deferred_slots, deferred),
        "resume_slot": column(deferred_by_unit, finished, deferred_slots, deferred),
    }
    for name, units in zip(WORK, (forward, backward, weight), strict=True):
        arrays[f"{name}_microbatch"] = np.ascontiguousarray(units[..., 0], np.int32)
        arrays[f"{name}_chunk"] = np.ascontiguousarray(units[..., 1], np.int32)
    for array in arrays.values():
        array.flags.writeable = False
    return Table(
        kind=kind,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        slots=slots,
        cotangent_slots=cotangent_slots,
        deferred_slots=deferred_slots,
        peak_stash=_peaks(arrived, finished),
        **arrays,
    )


def when(units: np.ndarray, microbatches: int, chunks: int) -> np.ndarray:
    """[stages, microbatches, chunks]: the tick at which each unit runs, -1 for never."""
    ticks = np.full((units.shape[1], microbatches, chunks), -1)
    tick, stage = np.nonzero(units[..., 0] >= 0)
    ticks[stage, units[tick, stage, 0], units[tick, stage, 1]] = tick
    return ticks


def arrival_ticks(ran: np.ndarray, returned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From the ticks of forwards and backwards, those at which each unit's activation and cotangent are first there.

    An activation: the tick after the stage before; where it enters (stage 0, chunk 0), the forward's own tick. A
    cotangent: the tick after the stage behind; where it leaves (last stage, last chunk), the tick of the head.
    """
    arrived, came_back = np.roll(ran, 1, axis=0) + 1, np.roll(returned, -1, axis=0) + 1
    arrived[0, :, 1:], arrived[0, :, 0] = ran[-1, :, :-1] + 1, ran[0, :, 0]
    came_back[-1, :, :-1], came_back[-1, :, -1] = returned[0, :, 1:] + 1, ran[-1, :, -1]
    return arrived, came_back


def units_of(table: Table, kind: str) -> np.ndarray:
    """[ticks, stages, (microbatch, chunk)] of one kind of work."""
    return np.stack([getattr(table, f"{kind}_microbatch"), getattr(table, f"{kind}_chunk")], axis=-1)


def arriving_forward(table: Table) -> np.ndarray:
    """[ticks, stages, (microbatch, chunk)]: whose activation comes in at the start of the tick, -1 for nobody's."""
    return _shifted(units_of(table, "forward"), to=1, chunks=table.chunks)


def arriving_backward(table: Table) -> np.ndarray:
    """The same for cotangents (those of the head are not sent, so are not here)."""
    return _shifted(units_of(table, "backward"), to=-1, chunks=table.chunks)


def _shifted(units: np.ndarray, to: int, chunks: int) -> np.ndarray:
    """What the neighbour did one tick ago; past the end of the stages it is the next chunk, past the last, nobody."""
    arriving = np.full_like(units, -1)
    arriving[1:] = np.roll(units[:-1], to, axis=1)
    wrapped = arriving[:, 0 if to == 1 else -1]
    wrapped[:, 1] += np.where(wrapped[:, 0] >= 0, to, 0)
    wrapped[(wrapped[:, 1] < 0) | (wrapped[:, 1] >= chunks)] = -1
    return arriving


def _idle(ticks: int, stages: int) -> np.ndarray:
    return np.full((ticks, stages, 2), -1, np.int32)


def _positive(stages: int, microbatches: int, chunks: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(f"a pipeline has at least one of its {name}", asked=f"{name}={value}", fix=f"{name}=1")


def _spans(first: np.ndarray, last: np.ndarray) -> Iterator[list[tuple[int, int, int]]]:
    """Per stage (first tick, last tick, flat index of the unit), by first tick."""
    for stage_first, stage_last in zip(first, last, strict=True):
        yield sorted(
            zip(stage_first.ravel().tolist(), stage_last.ravel().tolist(), range(stage_first.size), strict=True)
        )


def _colour(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """A slot for each unit, live from its first tick to its last, both included; spans in one slot do not overlap."""
    slot_of = np.zeros(first.shape, np.int64)
    for stage, spans in enumerate(_spans(first, last)):
        busy: list[tuple[int, int]] = []
        free: list[int] = []
        for start, stop, unit in spans:
            while busy and busy[0][0] < start:
                heappush(free, heappop(busy)[1])
            slot = heappop(free) if free else len(busy)
            heappush(busy, (stop, slot))
            slot_of[stage].flat[unit] = slot
    return slot_of


def _peaks(first: np.ndarray, last: np.ndarray) -> tuple[int, ...]:
    """Per stage, how many spans overlap at most."""
    change = np.zeros((len(first), last.max() + 2), np.int64)
    for stage in range(len(first)):
        np.add.at(change[stage], first[stage].ravel(), 1)
        np.add.at(change[stage], last[stage].ravel() + 1, -1)
    return tuple(change.cumsum(1).max(1).tolist())
