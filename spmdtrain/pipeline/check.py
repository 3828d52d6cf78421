"""Refuses a schedule that would compute something wrong, naming the first broken invariant.

Messages write a unit as schedule files do: F, B or W (forward, backward, weight gradient), then
microbatch.chunk.
"""

from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.pipeline.schedule import (
    WORK,
    Table,
    arrival_ticks,
    arriving_backward,
    arriving_forward,
    ticks_of,
    units_of,
)

LETTERS: dict[str, str] = dict(zip(WORK, "FBW", strict=True))

# The invariants, as a refusal states them.
RANGE = "a unit is one of the schedule's microbatches and chunks"
WORKS = "every tick has work"
ONCE = "each unit runs once"
FORWARD = "a forward runs at least one tick after that of the previous stage"
BACKWARD = (
    "a backward runs at least one tick after that of the next stage, "
    "or at the earliest with the last forward"
)
WEIGHT = "a weight gradient does not run before its backward"
SLOT = "a slot is not overwritten while it is live"
HOLDS = "a slot that is read has been filled before"


class _Access(NamedTuple):
    """One way in which a tick uses a ring.

    `what` is "put" (into a free slot), "read", or "take": read, and free the slot. `kind` is the
    kind of work that does it. `slots` [ticks, stages] and `units` [ticks, stages, 2] say where and
    for which (microbatch, chunk); a unit of -1 must name the trash slot.
    """

    what: str
    kind: str
    slots: np.ndarray
    units: np.ndarray


def check(table: Table) -> None:
    """Checks a table against all invariants: those of `check_units`, then the use of its slots.

    Raises ConfigError naming the first broken invariant, and where.
    """
    forward, backward, weight = (units_of(table, kind) for kind in WORK)
    check_units(table.microbatches, table.chunks, forward, backward, weight)

    stage = np.arange(table.stages)
    last_stage = table.stages - 1
    enters = (stage == 0) & (forward[..., 1] == 0)  # its input is the embedding
    leaves = (stage == last_stage) & (forward[..., 1] == table.chunks - 1)  # goes to the head
    entering_slot = np.where(enters, table.forward_slot, table.slots)
    received_slot = np.where(~enters, table.forward_slot, table.slots)

    # In each ring, accesses are listed in the order in which the executor makes them in a tick.
    received = arriving_forward(table)
    after_backward = "read" if table.split else "take"
    _replay(
        "stash",
        table.slots,
        _Access("put", "forward", table.arrive_forward_slot, received),
        _Access("put", "forward", entering_slot, _only(forward, enters)),
        _Access("read", "forward", received_slot, _only(forward, ~enters)),
        _Access(after_backward, "backward", table.backward_slot, backward),
        _Access("take", "weight", table.weight_slot, weight),
    )

    forward_ticks = ticks_of(forward, table.microbatches, table.chunks)
    backward_ticks = ticks_of(backward, table.microbatches, table.chunks)
    weight_ticks = ticks_of(weight, table.microbatches, table.chunks)
    _, cotangent_arrives = arrival_ticks(forward_ticks, backward_ticks)
    # If nothing waits there is no ring, and there are no slots to check.
    cotangents_wait = (cotangent_arrives < backward_ticks).any()
    if table.cotangent_slots or cotangents_wait:
        _replay(
            "cotangents",
            table.cotangent_slots,
            _Access("put", "backward", table.arrive_backward_slot, arriving_backward(table)),
            _Access("put", "forward", table.head_slot, _only(forward, leaves)),
            _Access("take", "backward", table.cotangent_slot, backward),
        )
    weights_wait = table.split and (backward_ticks < weight_ticks).any()
    if table.deferred_slots or weights_wait:
        _replay(
            "deferred",
            table.deferred_slots,
            _Access("put", "backward", table.defer_slot, backward),
            _Access("take", "weight", table.resume_slot, weight),
        )


def check_units(
    microbatches: int,
    chunks: int,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray,
) -> None:
    """Checks that units form a schedule, before they have slots.

    Each array is [ticks, stages, (microbatch, chunk)], -1 where a stage has no such work. Without
    weight gradients (`weight` is all -1) a backward computes both gradients.

    Raises ConfigError naming the first broken invariant, and where.
    """
    work = dict(zip(WORK, (forward, backward, weight), strict=True))
    for kind, units in work.items():
        _check_range(kind, units, microbatches, chunks)

    idle = np.all([units[..., 0] < 0 for units in work.values()], axis=(0, 2))
    if idle.any():
        tick = np.flatnonzero(idle)[0]
        detail = f"none at tick {tick}, stages 0 to {forward.shape[1] - 1}"
        raise _broken(WORKS, detail, fix="leaving the tick out")

    split = (weight >= 0).any()
    _check_once("forward", forward, microbatches, chunks)
    _check_once("backward", backward, microbatches, chunks)
    if split:
        _check_once("weight", weight, microbatches, chunks)

    forward_ticks = ticks_of(forward, microbatches, chunks)
    backward_ticks = ticks_of(backward, microbatches, chunks)
    activation_arrives, cotangent_arrives = arrival_ticks(forward_ticks, backward_ticks)
    _check_not_before(FORWARD, "forward", forward_ticks, activation_arrives)
    _check_not_before(BACKWARD, "backward", backward_ticks, cotangent_arrives)
    if split:
        weight_ticks = ticks_of(weight, microbatches, chunks)
        _check_not_before(WEIGHT, "weight", weight_ticks, backward_ticks)


def unit_name(kind: str, microbatch: int, chunk: int) -> str:
    """Names a unit as schedule files do: F3.0 is the forward of microbatch 3 in chunk 0."""
    return f"{LETTERS[kind]}{microbatch}.{chunk}"


def _broken(invariant: str, detail: str, fix: str = "") -> ConfigError:
    return ConfigError(f"pipeline schedule refused: {invariant}", found=detail, fix=fix)


def _check_range(kind: str, units: np.ndarray, microbatches: int, chunks: int) -> None:
    microbatch = units[..., 0]
    chunk = units[..., 1]
    idle = (microbatch == -1) & (chunk == -1)
    known = (microbatch >= 0) & (microbatch < microbatches)
    known &= (chunk >= 0) & (chunk < chunks)
    for tick, stage in np.argwhere(~idle & ~known):
        unit = unit_name(kind, *units[tick, stage])
        where = f"tick {tick}, stage {stage}"
        sizes = f"{microbatches} microbatches, {chunks} chunks"
        raise _broken(RANGE, f"{unit} at {where}, with {sizes}")


def _check_once(kind: str, units: np.ndarray, microbatches: int, chunks: int) -> None:
    """Checks that every unit of a kind of work runs on every stage, each at one tick."""
    tick_of: dict[tuple[int, int, int], int] = {}
    for tick, stage in np.argwhere(units[..., 0] >= 0).tolist():
        microbatch, chunk = units[tick, stage].tolist()
        before = tick_of.setdefault((stage, microbatch, chunk), tick)
        if before != tick:
            unit = unit_name(kind, microbatch, chunk)
            where = f"{unit} at tick {tick}, stage {stage}"
            raise _broken(ONCE, f"{where}, and earlier at tick {before}")

    # Stops at the first missing unit. An array of all would be huge if a file has a typo.
    every = (
        (stage, microbatch, chunk)
        for stage in range(units.shape[1])
        for microbatch in range(microbatches)
        for chunk in range(chunks)
    )
    missing = next((unit for unit in every if unit not in tick_of), None)
    if missing:
        stage, microbatch, chunk = missing
        raise _broken(ONCE, f"{unit_name(kind, microbatch, chunk)} at no tick of stage {stage}")


def _check_not_before(invariant: str, kind: str, ticks: np.ndarray, earliest: np.ndarray) -> None:
    """Checks `ticks` [stages, microbatches, chunks] against the earliest; names the first."""
    early = np.argwhere(ticks < earliest).tolist()
    if not early:
        return
    unit = min(early, key=lambda unit: (ticks[tuple(unit)], unit[0]))
    stage, microbatch, chunk = unit
    tick = ticks[tuple(unit)]
    ready = earliest[tuple(unit)]
    name = unit_name(kind, microbatch, chunk)
    raise _broken(invariant, f"{name} at tick {tick}, stage {stage}, ready at tick {ready}")


def _only(units: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Returns the units of these cells [ticks, stages]; the others become -1."""
    return np.where(cells[..., None], units, -1)


def _replay(ring: str, slots: int, *accesses: _Access) -> None:
    """Uses a ring as the executor will, tick by tick, and checks each access.

    `ring` is its name in messages, `slots` the number of slots without the trash.
    """
    held: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, slot) -> (microbatch, chunk)
    ticks, stages = accesses[0].slots.shape
    for tick in range(ticks):
        for access in accesses:
            slot_row = access.slots[tick].tolist()
            unit_row = access.units[tick].tolist()
            for stage in range(stages):
                slot = slot_row[stage]
                where = f"tick {tick}, stage {stage}, slot {slot} of {slots} ({ring})"
                _replay_access(access, held, (stage, slot), slots, unit_row[stage], where)


def _replay_access(
    access: _Access,
    held: dict[tuple[int, int], tuple[int, int]],
    at: tuple[int, int],
    slots: int,
    unit: list[int],
    where: str,
) -> None:
    """Makes one access of one stage. `at` is (stage, slot); `held` is updated."""
    _, slot = at
    microbatch, chunk = unit
    if microbatch < 0:
        if slot != slots:
            detail = f"{where}: no {access.kind} there, so its slot is the trash, {slots}"
            raise _broken(SLOT, detail)
        return

    name = unit_name(access.kind, microbatch, chunk)
    if not 0 <= slot < slots:
        raise _broken(HOLDS, f"{where}: {name} has no slot")
    if access.what == "put":
        if at in held:
            other = ".".join(map(str, held[at]))
            raise _broken(SLOT, f"{where}: {name} overwrites microbatch.chunk {other}")
        held[at] = (microbatch, chunk)
        return
    if held.get(at) != (microbatch, chunk):
        raise _broken(HOLDS, f"{where}: {name} finds another unit's or nothing")
    if access.what == "take":
        del held[at]
