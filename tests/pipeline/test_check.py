"""A schedule that would compute something wrong is refused, with the rule it breaks and where."""

from dataclasses import replace
from re import escape

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import ConfigError
from spmdtrain.pipeline import check as invariants
from spmdtrain.pipeline.check import check
from spmdtrain.pipeline.schedule import (
    SCHEDULE_KINDS,
    Table,
    assign_slots,
    build,
    interleaved,
    one_f_one_b,
    zero_bubble,
)

FEWER = settings(max_examples=60)


def swapped(table: Table, kind: str, one: tuple[int, int], other: tuple[int, int]) -> Table:
    """The table with the units of two cells (tick, stage) exchanged, slots left as they are."""
    arrays = {}
    for name in (f"{kind}_microbatch", f"{kind}_chunk"):
        arrays[name] = getattr(table, name).copy()
        arrays[name][one], arrays[name][other] = arrays[name][other], arrays[name][one]
    return replace(table, **arrays)


def changed(table: Table, name: str, cell: tuple[int, int], value: int) -> Table:
    array = getattr(table, name).copy()
    array[cell] = value
    return replace(table, **{name: array})


@FEWER
@given(st.data())
def test_swapping_any_two_different_cells_is_refused(data):
    kind = data.draw(st.sampled_from(SCHEDULE_KINDS))
    chunks = data.draw(st.integers(1, 3)) if kind in ("interleaved", "zero_bubble") else 1
    stages = data.draw(st.integers(1, 4))
    table = build(kind, stages, stages * data.draw(st.integers(1, 3)), chunks)
    work = data.draw(st.sampled_from(("forward", "backward") + ("weight",) * table.split))
    cells = st.tuples(st.integers(0, table.ticks - 1), st.integers(0, stages - 1))
    one, other = data.draw(cells), data.draw(cells)
    mutant = swapped(table, work, one, other)
    names = (f"{work}_microbatch", f"{work}_chunk")
    assume(any(getattr(table, name)[one] != getattr(table, name)[other] for name in names))
    with pytest.raises(ConfigError, match="pipeline schedule refused"):
        check(mutant)


@FEWER
@given(st.data())
def test_changing_any_slot_is_refused(data):
    kind = data.draw(st.sampled_from(SCHEDULE_KINDS))
    stages = data.draw(st.integers(2, 4))
    table = build(kind, stages, 2 * stages, 2 if kind == "interleaved" else 1)
    rings = {
        "stash": table.slots,
        "cotangents": table.cotangent_slots,
        "deferred": table.deferred_slots,
    }
    ring = data.draw(st.sampled_from([name for name, slots in rings.items() if slots]))
    arrays = {
        "stash": ["arrive_forward_slot", "forward_slot", "backward_slot"]
        + ["weight_slot"] * table.split,
        "cotangents": ["arrive_backward_slot", "head_slot", "cotangent_slot"],
        "deferred": ["defer_slot", "resume_slot"],
    }[ring]
    name = data.draw(st.sampled_from(arrays))
    cell = data.draw(st.tuples(st.integers(0, table.ticks - 1), st.integers(0, stages - 1)))
    value = data.draw(st.integers(0, rings[ring]))
    assume(getattr(table, name)[cell] != value)
    with pytest.raises(ConfigError, match=f"{escape(invariants.SLOT)}|{escape(invariants.HOLDS)}"):
        check(changed(table, name, cell, value))


# 1F1B with 3 stages: stage s runs forward k at tick s + k and backward k at tick 4 - s + k.
FIRST_BROKEN = {
    "a microbatch that is not there": (
        changed(one_f_one_b(3, 4), "forward_microbatch", (2, 1), 4),
        invariants.RANGE,
        "F4.0 at tick 2, stage 1, with 4 microbatches, 1 chunks",
    ),
    "a chunk that is not there": (
        changed(interleaved(2, 4, 2), "backward_chunk", (3, 1), 2),
        invariants.RANGE,
        "B0.2 at tick 3, stage 1, with 4 microbatches, 2 chunks",
    ),
    "a unit twice": (
        changed(one_f_one_b(3, 4), "backward_microbatch", (5, 1), 0),
        invariants.ONCE,
        "B0.0 at tick 5, stage 1, and earlier at tick 3",
    ),
    "a unit left out": (
        changed(
            changed(one_f_one_b(3, 4), "forward_microbatch", (3, 1), -1),
            "forward_chunk",
            (3, 1),
            -1,
        ),
        invariants.ONCE,
        "F2.0 at no tick of stage 1",
    ),
    "a forward before its activation": (
        swapped(one_f_one_b(3, 4), "forward", (1, 1), (2, 1)),
        invariants.FORWARD,
        "F1.0 at tick 1, stage 1, ready at tick 2",
    ),
    "a forward whose next stage does not wait": (
        swapped(one_f_one_b(3, 4), "forward", (0, 0), (3, 0)),
        invariants.FORWARD,
        "F0.0 at tick 1, stage 1, ready at tick 4",
    ),
    "a second chunk before its activation came round": (
        swapped(interleaved(2, 4, 2), "forward", (2, 0), (1, 0)),
        invariants.FORWARD,
        "F0.1 at tick 1, stage 0, ready at tick 2",
    ),
    "a backward before its cotangent": (
        swapped(one_f_one_b(3, 4), "backward", (3, 1), (4, 1)),
        invariants.BACKWARD,
        "B1.0 at tick 3, stage 1, ready at tick 4",
    ),
    "a backward before the head": (
        swapped(one_f_one_b(3, 4), "backward", (2, 2), (3, 2)),
        invariants.BACKWARD,
        "B1.0 at tick 2, stage 2, ready at tick 3",
    ),
    "a weight gradient before its backward": (
        swapped(zero_bubble(3, 4), "weight", (4, 0), (5, 0)),
        invariants.WEIGHT,
        "W1.0 at tick 4, stage 0, ready at tick 5",
    ),
    "two live units in a slot": (
        changed(changed(one_f_one_b(3, 4), "forward_slot", (2, 0), 0), "backward_slot", (6, 0), 0),
        invariants.SLOT,
        "tick 2, stage 0, slot 0 of 4 (stash): F2.0 overwrites microbatch.chunk 0.0",
    ),
    "an activation that arrives in a live slot": (
        changed(one_f_one_b(3, 4), "arrive_forward_slot", (2, 1), 0),
        invariants.SLOT,
        "tick 2, stage 1, slot 0 of 4 (stash): F1.0 overwrites microbatch.chunk 0.0",
    ),
    "garbage in a live slot": (
        changed(one_f_one_b(3, 4), "forward_slot", (4, 0), 1),
        invariants.SLOT,
        "tick 4, stage 0, slot 1 of 4 (stash): no forward there, so its slot is the trash, 4",
    ),
    "a backward that reads another unit": (
        changed(one_f_one_b(3, 4), "backward_slot", (4, 0), 1),
        invariants.HOLDS,
        "tick 4, stage 0, slot 1 of 4 (stash): B0.0 finds another unit's or nothing",
    ),
    "a unit without a slot": (
        changed(one_f_one_b(3, 4), "forward_slot", (0, 0), 4),
        invariants.HOLDS,
        "tick 0, stage 0, slot 4 of 4 (stash): F0.0 has no slot",
    ),
}


@pytest.mark.parametrize("case", FIRST_BROKEN)
def test_the_first_broken_rule_is_named_with_tick_stage_and_unit(case):
    table, rule, found = FIRST_BROKEN[case]
    with pytest.raises(ConfigError) as refusal:
        check(table)
    assert str(refusal.value) == f"pipeline schedule refused: {rule}; found {found}"


def test_a_tick_without_work_is_refused():
    table = one_f_one_b(2, 2)
    units = [
        np.insert(invariants.units_of(table, kind), 2, -1, axis=0)
        for kind in ("forward", "backward", "weight")
    ]
    with pytest.raises(ConfigError, match=f"{invariants.WORKS}; found none at tick 2"):
        check(assign_slots("gap", 2, 1, *units))


def test_what_waits_without_a_ring_is_refused():
    table = build("gpipe", 2, 3)
    trash = np.zeros_like(table.head_slot)
    with pytest.raises(
        ConfigError, match=f"{invariants.HOLDS}; found tick 1, stage 1, slot 0 of 0 .cotangents."
    ):
        check(
            replace(
                table,
                cotangent_slots=0,
                arrive_backward_slot=trash,
                head_slot=trash,
                cotangent_slot=trash,
            )
        )
    table = zero_bubble(2, 3)
    trash = np.zeros_like(table.defer_slot)
    with pytest.raises(
        ConfigError, match=f"{invariants.HOLDS}; found tick 1, stage 1, slot 0 of 0 .deferred."
    ):
        check(replace(table, deferred_slots=0, defer_slot=trash, resume_slot=trash))
