"""Refuses a schedule that would compute something wrong, naming the first rule that is broken, and where.

A unit is written as in schedule files: F, B or W (forward, backward, weight gradient), then microbatch.chunk.
"""

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.pipeline.schedule import (
    WORK,
    Table,
    arrival_ticks,
    arriving_backward,
    arriving_forward,
    units_of,
    when,
)

LETTERS: dict[str, str] = dict(zip(WORK, "FBW", strict=True))

RANGE = "a unit is one of the schedule's microbatches and chunks"
WORKS = "every tick has work"
ONCE = "each unit runs once"
FORWARD = "a forward runs at least one tick after the stage before it"
BACKWARD = "a backward runs at least one tick after the stage behind it, or at the earliest with the last forward"
WEIGHT = "a weight gradient runs not before its backward"
SLOT = "a slot is not overwritten while it is live"
HOLDS = "what is read from a slot has been put there"


def check(table: Table) -> None:
    """Raises ConfigError unless the table obeys all rules: those of `check_units`, then SLOT and HOLDS."""
    units = {kind: units_of(table, kind) for kind in WORK}
    check_units(table.microbatches, table.chunks, *units.values())
    forward, backward, weight = units.values()
    stage, last = np.arange(table.stages), table.stages - 1
    enters = (stage == 0) & (forward[..., 1] == 0)
    leaves = (stage == last) & (forward[..., 1] == table.chunks - 1)
    entered, received = (np.where(cells, table.forward_slot, table.slots) for cells in (enters, ~enters))
    _replay(
        "stash",
        table.slots,
        ("put", "forward", table.arrive_forward_slot, arriving_forward(table)),
        ("put", "forward", entered, _only(forward, enters)),
        ("read", "forward", received, _only(forward, ~enters)),
        ("read" if table.split else "take", "backward", table.backward_slot, backward),
        ("take", "weight", table.weight_slot, weight),
    )
    ran, returned, finished = (when(kind, table.microbatches, table.chunks) for kind in units.values())
    if table.cotangent_slots or (arrival_ticks(ran, returned)[1] < returned).any():
        _replay(
            "cotangents",
            table.cotangent_slots,
            ("put", "backward", table.arrive_backward_slot, arriving_backward(table)),
            ("put", "forward", table.head_slot, _only(forward, leaves)),
            ("take", "backward", table.cotangent_slot, backward),
        )
    if table.deferred_slots or (table.split and (returned < finished).any()):
        _replay(
            "deferred",
            table.deferred_slots,
            ("put", "backward", table.defer_slot, backward),
            ("take", "weight", table.resume_slot, weight),
        )


def check_units(microbatches: int, chunks: int, forward: np.ndarray, backward: np.ndarray, weight: np.ndarray) -> None:
    """Raises ConfigError unless these units, [ticks, stages, (microbatch, chunk)], are a schedule (slots apart)."""
    work = dict(zip(WORK, (forward, backward, weight), strict=True))
    for kind, units in work.items():
        _in_range(kind, units, microbatches, chunks)
    idle = np.flatnonzero(np.all([units[..., 0] < 0 for units in work.values()], axis=(0, 2)))
    if idle.size:
        raise _broken(WORKS, f"none at tick {idle[0]}, stages 0 to {forward.shape[1] - 1}", fix="leaving the tick out")
    for kind, units in work.items():
        if kind != "weight" or (units >= 0).any():
            _once(kind, units, microbatches, chunks)
    ran, returned, finished = (when(units, microbatches, chunks) for units in work.values())
    arrived, came_back = arrival_ticks(ran, returned)
    _not_before(FORWARD, "forward", ran, arrived)
    _not_before(BACKWARD, "backward", returned, came_back)
    if (weight >= 0).any():
        _not_before(WEIGHT, "weight", finished, returned)


def unit_name(kind: str, microbatch: int, chunk: int) -> str:
    """As in schedule files: F3.0 is the forward of microbatch 3 in chunk 0."""
    return f"{LETTERS[kind]}{microbatch}.{chunk}"


def _broken(rule: str, found: str, fix: str = "") -> ConfigError:
    return ConfigError(f"pipeline schedule refused: {rule}", found=found, fix=fix)


def _in_range(kind: str, units: np.ndarray, microbatches: int, chunks: int) -> None:
    microbatch, chunk = units[..., 0], units[..., 1]
    idle = (microbatch == -1) & (chunk == -1)
    wrong = ~idle & ((microbatch < 0) | (microbatch >= microbatches) | (chunk < 0) | (chunk >= chunks))
    for tick, stage in np.argwhere(wrong):
        unit = unit_name(kind, *units[tick, stage])
        raise _broken(RANGE, f"{unit} at tick {tick}, stage {stage}, with {microbatches} microbatches, {chunks} chunks")


def _once(kind: str, units: np.ndarray, microbatches: int, chunks: int) -> None:
    first: dict[tuple[int, int, int], int] = {}
    for tick, stage in np.argwhere(units[..., 0] >= 0).tolist():
        microbatch, chunk = units[tick, stage].tolist()
        before = first.setdefault((stage, microbatch, chunk), tick)
        if before != tick:
            unit = unit_name(kind, microbatch, chunk)
            raise _broken(ONCE, f"{unit} at tick {tick}, stage {stage}, and there at tick {before} before")
    every = (
        (stage, microbatch, chunk)
        for stage in range(units.shape[1])
        for microbatch in range(microbatches)
        for chunk in range(chunks)
    )
    missing = next((unit for unit in every if unit not in first), None)  # not an array of all: a typo may be huge
    if missing:
        stage, microbatch, chunk = missing
        raise _broken(ONCE, f"{unit_name(kind, microbatch, chunk)} at no tick of stage {stage}")


def _not_before(rule: str, kind: str, ticks: np.ndarray, earliest: np.ndarray) -> None:
    early = np.argwhere(ticks < earliest)
    if len(early):
        stage, microbatch, chunk = min(early.tolist(), key=lambda unit: (ticks[tuple(unit)], unit[0]))
        tick, ready = ticks[stage, microbatch, chunk], earliest[stage, microbatch, chunk]
        found = f"{unit_name(kind, microbatch, chunk)} at tick {tick}, stage {stage}, ready at tick {ready}"
        raise _broken(rule, found)


def _only(units: np.ndarray, cells: np.ndarray) -> np.ndarray:
    return np.where(cells[..., None], units, -1)


def _replay(ring: str, slots: int, *steps: tuple[str, str, np.ndarray, np.ndarray]) -> None:
    """Does to a ring what the executor will: `put` needs a free slot, `read` the right unit, `take` reads and frees.

    A step is (what, kind, [ticks, stages] slots, [ticks, stages, 2] units). Cells without a unit must name the trash.
    """
    held: dict[tuple[int, int], tuple[int, int]] = {}
    ticks, stages = steps[0][2].shape
    for tick, what, kind, slot_row, unit_row in (
        (tick, what, kind, slot[tick].tolist(), units[tick].tolist())
        for tick in range(ticks)
        for what, kind, slot, units in steps
    ):
        for stage in range(stages):
            place, (microbatch, chunk) = (stage, slot_row[stage]), unit_row[stage]
            where = f"tick {tick}, stage {stage}, slot {place[1]} of {slots} ({ring})"
            if microbatch < 0 and place[1] != slots:
                raise _broken(SLOT, f"{where}: no {kind} there, so its slot is the trash, {slots}")
            if microbatch < 0:
                continue
            unit = unit_name(kind, microbatch, chunk)
            if not 0 <= place[1] < slots:
                raise _broken(HOLDS, f"{where}: {unit} has no slot")
            if what == "put" and place in held:
                raise _broken(SLOT, f"{where}: {unit} overwrites microbatch.chunk {'.'.join(map(str, held[place]))}")
            if what == "put":
                held[place] = (microbatch, chunk)
            elif held.get(place) != (microbatch, chunk):
                raise _broken(HOLDS, f"{where}: {unit} finds another unit's or nothing")
            elif what == "take":
                del held[place]
