"""Builds pipeline schedules as numpy tables: what every stage does at every tick, and where data
waits.

Words. A *stage* is a share of the devices. It holds `chunks` runs of layers, and a microbatch
passes chunk 0 of all stages, then chunk 1 of all stages, and so on. A *unit* is one microbatch in
one chunk of one stage. It has a forward, a backward and, if backward is split, a weight gradient
(then "backward" is the gradient of the input alone). All stages tick together, and in one tick a
stage runs at most one unit of each kind of work. A *slot* is an element of a ring buffer.

One tick does the following on every stage, in this order. This is all that an executor must know.

1. The microbatch whose last backward ran on stage 0 in the previous tick has the backward of its
   embedding.
2. What the neighbours sent at the end of the last tick arrives. The activation of the previous
   stage (for stage 0: of the last stage, for the next chunk) goes into
   `stash[arrive_forward_slot]`, the cotangent of the next stage into
   `cotangents[arrive_backward_slot]`. During this one tick it can also be read without a slot; what
   is used later waits in its slot.
3. The forward reads its input from `stash[forward_slot]` (stage 0, chunk 0: what was embedded in
   the previous tick) and leaves there what its backward needs.
4. The head runs after a forward of the last chunk on the last stage. The cotangent that it yields
   goes into `cotangents[head_slot]`.
5. The backward reads `stash[backward_slot]` and `cotangents[cotangent_slot]`. If it is split, it
   leaves in `deferred[defer_slot]` what the weight gradient needs in addition to the stash.
6. The weight gradient reads `stash[weight_slot]` and `deferred[resume_slot]`.
7. The microbatch that enters stage 0 in the next tick is embedded.

The embedding for the first tick precedes it, and the last backward of an embedding follows the last
tick. One tick away from their units, both fall on the ticks in which the interleaved schedules run
the head. Their other ticks have no work on the vocabulary at all, and no sum over the stages.

A ring holds its slots and one more, the trash, whose index is the number of slots. Stages without
work, and arrivals that are not needed, write there, so no select is necessary.

If nothing in the whole table ever waits in a ring, the executor needs no ring: `activations_wait`
is False (a forward reads its input as it arrives), `cotangent_slots` is 0, `deferred_slots` is 0.
This holds for all schedules built here, except for the head's cotangents in GPipe and for what
zero_bubble defers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import get_args

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import PipelineSchedule

SCHEDULE_KINDS: tuple[str, ...] = get_args(PipelineSchedule)
WORK: tuple[str, ...] = ("forward", "backward", "weight")  # the kinds of work, in a tick's order


@dataclass(frozen=True, eq=False)
class Table:
    """A schedule. Two tables are equal if all their fields are.

    The arrays are int32 [ticks, stages]. A microbatch or chunk of -1 means that the stage has no
    such work at that tick; a slot equal to the trash index means that it uses no slot.

    `slots`, `cotangent_slots` and `deferred_slots` are the sizes of the three rings without the
    trash; `peak_stash` is, for each stage, the largest number of live slots of the stash.
    """

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
        return all(
            np.array_equal(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        )

    @property
    def ticks(self) -> int:
        return len(self.forward_microbatch)

    @property
    def split(self) -> bool:
        """True if the backward is split: weight gradients are separate units."""
        return bool((self.weight_microbatch >= 0).any())

    @property
    def activations_wait(self) -> bool:
        """True if some activation arrives before the tick of its forward."""
        arriving = arriving_forward(self)
        arrives = arriving[..., 0] >= 0
        return bool((arriving != units_of(self, "forward"))[arrives].any())

    @property
    def entering_microbatch(self) -> np.ndarray:
        """The microbatch [ticks] whose first forward, on stage 0, runs at this tick, or -1."""
        return np.where(self.forward_chunk[:, 0] == 0, self.forward_microbatch[:, 0], -1)

    @property
    def leaving_microbatch(self) -> np.ndarray:
        """The microbatch [ticks] whose last backward, on stage 0, runs at this tick, or -1."""
        return np.where(self.backward_chunk[:, 0] == 0, self.backward_microbatch[:, 0], -1)

    @property
    def embed_microbatch(self) -> np.ndarray:
        """The microbatch [ticks] that is embedded at this tick, or -1; it enters at the next."""
        return np.append(self.entering_microbatch[1:], np.int32(-1))

    @property
    def embed_backward_microbatch(self) -> np.ndarray:
        """The microbatch [ticks] whose embedding has its backward at this tick, or -1.

        It left stage 0 at the previous tick.
        """
        return np.append(np.int32(-1), self.leaving_microbatch[:-1])

    @property
    def head_microbatch(self) -> np.ndarray:
        """The microbatch [ticks] whose head runs at this tick, leaving the last stage, or -1."""
        leaves = self.forward_chunk[:, -1] == self.chunks - 1
        return np.where(leaves, self.forward_microbatch[:, -1], -1)


def build(kind: str, stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Builds the schedule called `kind`, one of SCHEDULE_KINDS.

    Raises ConfigError if there is none of that name, or if it cannot have these sizes.
    """
    if kind == "interleaved":
        return interleaved(stages, microbatches, chunks)
    if kind == "zero_bubble":
        return zero_bubble(stages, microbatches, chunks)
    if kind not in SCHEDULE_KINDS:
        raise ConfigError(
            "unknown pipeline schedule", asked=repr(kind), fix=", ".join(SCHEDULE_KINDS)
        )
    if chunks != 1:
        raise ConfigError(
            f"pipeline schedule {kind!r} has one chunk per stage",
            asked=f"chunks={chunks}",
            fix="'interleaved'",
        )
    if kind == "gpipe":
        return gpipe(stages, microbatches)
    return one_f_one_b(stages, microbatches)


def gpipe(stages: int, microbatches: int) -> Table:
    """Runs all forwards, then all backwards in reverse (Huang et al., arXiv 1811.06965).

    Takes 2 (m + p - 1) ticks; the stash holds all m microbatches.
    """
    _check_sizes(stages, microbatches, 1)
    ticks = 2 * (microbatches + stages - 1)
    forward, backward, weight = (_no_units(ticks, stages) for _ in WORK)
    microbatch = np.arange(microbatches)
    chunk = np.zeros_like(microbatch)
    for stage in range(stages):
        forward[stage + microbatch, stage] = np.stack([microbatch, chunk], axis=1)
        backward_start = ticks // 2 + stages - 1 - stage
        backward[backward_start + microbatch, stage] = np.stack([microbatch[::-1], chunk], axis=1)
    return assign_slots("gpipe", microbatches, 1, forward, backward, weight)


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """Builds 1F1B in paired ticks (one forward, one backward): `interleaved` with one chunk.

    Stage s stashes 2 (p - 1 - s) + 1 microbatches, while unpaired 1F1B stashes p - s.
    """
    return _paired("1f1b", stages, microbatches, 1)


def interleaved(stages: int, microbatches: int, chunks: int) -> Table:
    """Builds interleaved 1F1B in paired ticks, with a bubble of (p - 1) / (v m) of the ideal time.

    This is the bubble of Narayanan et al., arXiv 2104.04473. Forward work fills m v + p - 1 ticks
    and backward work the same number; in total there are m v + v p + p - 2. Stage s stashes (v - 1)
    p + 2 (p - 1 - s) + 1 chunks, or all m v if those are fewer. Raises ConfigError unless p divides
    m (with one chunk any m will do).
    """
    return _paired("interleaved", stages, microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Builds `interleaved` with backward split: weight gradients fill the drain.

    See Qi et al., arXiv 2401.10241. Backwards reach the stages one after another. Weight gradients
    are put off until all stages run the same one in the same tick, that of stage 0's backward: then
    no tick has a weight gradient on some stages only. Of the three parts of the bubble, (p - 1)(F +
    B + W) / v, only (p - 1)(F + B) / v is left, the least that stages in lockstep can have. The
    largest stash does not grow, because stage 0, which has it, puts nothing off.
    """
    return _paired("zero_bubble", stages, microbatches, chunks, split=True)


def _paired(kind: str, stages: int, microbatches: int, chunks: int, split: bool = False) -> Table:
    """Builds a schedule whose steady ticks pair a forward with a backward.

    Units come in groups of p microbatches, chunk after chunk. On stage s forward k runs at tick s +
    k and backward k at tick v p - 1 + k + (p - 1 - s). So what a stage sends is used exactly one
    tick later, and the last stage turns round within a tick: nothing waits in a ring.
    """
    _check_sizes(stages, microbatches, chunks)
    if chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        legal = [number for number in (below, below + stages) if number]
        raise ConfigError(
            "interleaving goes through microbatches in groups of one per stage",
            asked=f"microbatches={microbatches} with stages={stages}, chunks={chunks}",
            fix=" or ".join(f"microbatches={number}" for number in legal),
        )
    round_trip = chunks * stages  # units in a group, and ticks from the first stage to the head
    unit = np.arange(microbatches * chunks)
    # p microbatches through chunk 0, the same p through chunk 1, and so on; then the next p. After
    # p ticks the first of them is back at stage 0, just when its next chunk is due.
    microbatch = unit // round_trip * stages + unit % stages
    chunk = unit % round_trip // stages
    first_to_last = np.stack([microbatch, chunk], axis=1)
    last_to_first = np.stack([microbatch, chunks - 1 - chunk], axis=1)

    ticks = len(unit) + round_trip + stages - 2
    forward, backward, weight = (_no_units(ticks, stages) for _ in WORK)
    for stage in range(stages):
        forward[stage + unit, stage] = first_to_last
        backward[round_trip - 1 + unit + stages - 1 - stage, stage] = last_to_first
        if split:
            # No `- stage`: all stages run the same weight gradient in the same tick.
            weight[round_trip - 1 + unit + stages - 1, stage] = last_to_first
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
    frozen: int = 0,
) -> Table:
    """Makes the table of these units, giving everything that waits a slot for as long as it lives.

    The units, [ticks, stages, (microbatch, chunk)] each, must have passed `check.check_units`.
    `stash`, [ticks, stages], sets the stash slots of the forwards by hand. The first `frozen`
    chunks that a microbatch passes have forwards alone.

    Slots are assigned greedily, by the start of lives. That takes as many slots as lives that
    overlap at most, so fewer would not do.
    """
    stages = forward.shape[1]
    split = bool((weight >= 0).any())
    forward_ticks = ticks_of(forward, microbatches, chunks)
    backward_ticks = ticks_of(backward, microbatches, chunks)
    # The last use of what the stash holds.
    weight_ticks = ticks_of(weight, microbatches, chunks) if split else backward_ticks
    activation_arrives, cotangent_arrives = arrival_ticks(forward_ticks, backward_ticks)
    learns = np.broadcast_to(passed_before(stages, chunks) >= frozen, forward_ticks.shape)
    last_read = np.where(learns, weight_ticks, forward_ticks)
    stashed = learns | (activation_arrives < forward_ticks)

    # The three rings. `*_of_unit` are [stages, microbatches, chunks].
    if stash is None:
        stash_of_unit = _share_slots(activation_arrives, last_read, stashed)
    else:
        stash_of_unit = stash[forward_ticks, np.arange(stages)[:, None, None]]
    slots = int(stash_of_unit[stashed].max()) + 1

    cotangents_wait = bool((cotangent_arrives < backward_ticks)[learns].any())
    cotangent_of_unit = _share_slots(cotangent_arrives, backward_ticks, learns)
    cotangent_slots = int(cotangent_of_unit.max()) + 1 if cotangents_wait else 0

    weights_wait = split and bool((backward_ticks < weight_ticks).any())
    deferred_of_unit = _share_slots(backward_ticks, weight_ticks, learns)
    deferred_slots = int(deferred_of_unit.max()) + 1 if weights_wait else 0

    def column(
        slot_of_unit: np.ndarray,
        tick_of_unit: np.ndarray,
        trash: int,
        among: np.ndarray,
    ) -> np.ndarray:
        """Returns [ticks, stages]: the slot of the unit that uses one at this tick, or the trash.

        Only units in `among`, [stages, microbatches, chunks], use one.
        """
        slot = np.full(forward.shape[:2], trash, np.int32)
        unit = np.nonzero(among)
        stage, _, _ = unit
        slot[tick_of_unit[unit], stage] = slot_of_unit[unit]
        return slot

    enters = np.zeros(forward_ticks.shape, bool)  # its input is the embedding: it never arrives
    enters[0, :, 0] = True
    leaves = np.zeros(forward_ticks.shape, bool)  # its cotangent comes from the head
    leaves[-1, :, -1] = True
    received = learns & ~leaves & cotangents_wait
    from_head = leaves & cotangents_wait
    arrays = {
        "forward_slot": column(stash_of_unit, forward_ticks, slots, stashed),
        "backward_slot": column(stash_of_unit, backward_ticks, slots, learns),
        "weight_slot": column(stash_of_unit, weight_ticks, slots, learns & split),
        "arrive_forward_slot": column(stash_of_unit, activation_arrives, slots, stashed & ~enters),
        "arrive_backward_slot": column(
            cotangent_of_unit, cotangent_arrives, cotangent_slots, received
        ),
        "head_slot": column(cotangent_of_unit, cotangent_arrives, cotangent_slots, from_head),
        "cotangent_slot": column(
            cotangent_of_unit, backward_ticks, cotangent_slots, learns & cotangents_wait
        ),
        "defer_slot": column(
            deferred_of_unit, backward_ticks, deferred_slots, learns & weights_wait
        ),
        "resume_slot": column(
            deferred_of_unit, weight_ticks, deferred_slots, learns & weights_wait
        ),
    }
    for name, units in zip(WORK, (forward, backward, weight), strict=True):
        arrays[f"{name}_microbatch"] = np.ascontiguousarray(units[..., 0], np.int32)
        arrays[f"{name}_chunk"] = np.ascontiguousarray(units[..., 1], np.int32)
    for array in arrays.values():
        array.flags.writeable = False  # a table is frozen, and shared
    return Table(
        kind=kind,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        slots=slots,
        cotangent_slots=cotangent_slots,
        deferred_slots=deferred_slots,
        peak_stash=_most_alive(activation_arrives, last_read, stashed),
        **arrays,
    )


def without_backward_of(table: Table, frozen: int) -> Table:
    """Returns the table without backward and weight gradients of the first `frozen` chunks that a
    microbatch passes.

    Ticks without work are dropped, and all weight gradients move the same number of ticks
    earlier, as many as possible. The rest needs the stash of the first stage that still learns.
    """
    if not frozen:
        return table
    forward, backward, weight = (units_of(table, kind) for kind in WORK)
    passed = passed_before(table.stages, table.chunks)[:, 0]
    for units in (backward, weight):
        learns = passed[np.arange(table.stages), units[..., 1]] >= frozen
        units[~learns] = -1
    if table.split:
        sizes = (table.microbatches, table.chunks)
        waits = ticks_of(weight, *sizes) - ticks_of(backward, *sizes)
        weight = np.roll(weight, -int(waits[ticks_of(backward, *sizes) >= 0].min()), axis=0)
    busy = np.any([(units[..., 0] >= 0).any(1) for units in (forward, backward, weight)], axis=0)
    work = (units[busy] for units in (forward, backward, weight))
    return assign_slots(table.kind, table.microbatches, table.chunks, *work, frozen=frozen)


def passed_before(stages: int, chunks: int) -> np.ndarray:
    """Returns [stages, 1, chunks]: how many chunks a microbatch passes before each."""
    return (np.arange(chunks) * stages + np.arange(stages)[:, None])[:, None]


def ticks_of(units: np.ndarray, microbatches: int, chunks: int) -> np.ndarray:
    """Returns [stages, microbatches, chunks]: the tick at which each unit runs, -1 for never."""
    # Assumes that a unit runs at most once; check.py makes sure of it.
    ticks = np.full((units.shape[1], microbatches, chunks), -1)
    tick, stage = np.nonzero(units[..., 0] >= 0)
    microbatch, chunk = units[tick, stage].T
    ticks[stage, microbatch, chunk] = tick
    return ticks


def arrival_ticks(
    forward_ticks: np.ndarray, backward_ticks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ticks at which each unit's activation and its cotangent first arrive.

    All arrays are [stages, microbatches, chunks]. An activation arrives one tick after the forward
    of the previous stage; the embedding (stage 0, chunk 0) in the tick of its own forward. A
    cotangent arrives one tick after the backward of the next stage; that of the head (last stage,
    last chunk) in the tick of the last forward, after which the head runs.
    """
    activation = np.roll(forward_ticks, 1, axis=0) + 1
    activation[0, :, 1:] = forward_ticks[-1, :, :-1] + 1  # the last stage, one chunk earlier
    activation[0, :, 0] = forward_ticks[0, :, 0]
    cotangent = np.roll(backward_ticks, -1, axis=0) + 1
    cotangent[-1, :, :-1] = backward_ticks[0, :, 1:] + 1  # the first stage, one chunk later
    cotangent[-1, :, -1] = forward_ticks[-1, :, -1]
    return activation, cotangent


def units_of(table: Table, kind: str) -> np.ndarray:
    """Returns [ticks, stages, (microbatch, chunk)] of one kind of work, -1 for none."""
    microbatch = getattr(table, f"{kind}_microbatch")
    chunk = getattr(table, f"{kind}_chunk")
    return np.stack([microbatch, chunk], axis=-1)


def arriving_forward(table: Table) -> np.ndarray:
    """Returns [ticks, stages, (microbatch, chunk)] of the activations arriving as each tick starts.

    It is -1 where none does. The chunk is the one that will read it.
    """
    return _shift(units_of(table, "forward"), to=1, chunks=table.chunks)


def arriving_backward(table: Table) -> np.ndarray:
    """Returns the same for cotangents, without those of the head, which no stage sends."""
    return _shift(units_of(table, "backward"), to=-1, chunks=table.chunks)


def _shift(units: np.ndarray, to: int, chunks: int) -> np.ndarray:
    """Moves units one tick on and one stage along (`to` is 1 or -1).

    Past the end of the stages a unit enters the next chunk; past the last chunk it is gone.
    """
    arriving = np.full_like(units, -1)
    arriving[1:] = np.roll(units[:-1], to, axis=1)
    wrapped = arriving[:, 0 if to == 1 else -1]  # a view: the stage that the roll wraps round to
    wrapped[:, 1] += np.where(wrapped[:, 0] >= 0, to, 0)
    wrapped[(wrapped[:, 1] < 0) | (wrapped[:, 1] >= chunks)] = -1
    return arriving


def _no_units(ticks: int, stages: int) -> np.ndarray:
    return np.full((ticks, stages, 2), -1, np.int32)


def _check_sizes(stages: int, microbatches: int, chunks: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(
                f"a pipeline has at least one of its {name}",
                asked=f"{name}={value}",
                fix=f"{name}=1",
            )


# Lives: for each unit, [stages, microbatches, chunks], the first and the last tick (inclusive) at
# which something of it must be in its slot.


def _share_slots(first: np.ndarray, last: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns each unit's slot, so that lives in one slot of a stage do not overlap.

    Units that are not in `among` have no life, and 0.
    """
    slot_of_unit = np.zeros(first.shape, np.int64)
    for stage, lives in enumerate(_lives_by_start(first, last, among)):
        busy: list[tuple[int, int]] = []  # heap of (last tick, slot)
        free: list[int] = []  # heap of slots that have been used before
        for start, stop, unit in lives:
            # Strictly less: a slot is read in the last tick of a life, after arrivals have been put
            # into theirs, so it is free from the next tick on.
            while busy and busy[0][0] < start:
                _, slot = heappop(busy)
                heappush(free, slot)
            slot = heappop(free) if free else len(busy)
            heappush(busy, (stop, slot))
            slot_of_unit[stage].flat[unit] = slot
    return slot_of_unit


def _lives_by_start(
    first: np.ndarray, last: np.ndarray, among: np.ndarray
) -> Iterator[list[tuple[int, int, int]]]:
    """Yields for each stage (first tick, last tick, flat index of the unit), sorted."""
    for stage_first, stage_last, lives in zip(first, last, among, strict=True):
        units = np.flatnonzero(lives)
        starts = stage_first.ravel()[units].tolist()
        stops = stage_last.ravel()[units].tolist()
        yield sorted(zip(starts, stops, units.tolist(), strict=True))


def _most_alive(first: np.ndarray, last: np.ndarray, among: np.ndarray) -> tuple[int, ...]:
    """Returns for each stage the largest number of lives that overlap."""
    change = np.zeros((len(first), last.max() + 2), np.int64)
    for stage, lives in enumerate(among):
        np.add.at(change[stage], first[stage][lives], 1)
        np.add.at(change[stage], last[stage][lives] + 1, -1)
    return tuple(change.cumsum(1).max(1).tolist())
