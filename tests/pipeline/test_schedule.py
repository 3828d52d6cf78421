"""Schedules: their tick counts, stashes and phases, and that the arrays alone are enough to run
them.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import waiting_table

from spmdtrain.config.errors import ConfigError
from spmdtrain.pipeline.check import check
from spmdtrain.pipeline.phases import phases, rounds
from spmdtrain.pipeline.schedule import (
    SCHEDULE_KINDS,
    Table,
    build,
    gpipe,
    interleaved,
    one_f_one_b,
    passed_before,
    units_of,
    without_backward_of,
    zero_bubble,
)

FEWER = settings(max_examples=60)

stages_ = st.integers(1, 8)
chunks_ = st.integers(1, 4)


@st.composite
def tables(draw) -> Table:
    """Any of the schedules that are built in."""
    kind, stages = draw(st.sampled_from(SCHEDULE_KINDS)), draw(stages_)
    chunks = draw(chunks_) if kind in ("interleaved", "zero_bubble") else 1
    microbatches = draw(st.integers(1, 4)) * stages if chunks > 1 else draw(st.integers(1, 20))
    return build(kind, stages, microbatches, chunks)


@st.composite
def waiting_tables(draw) -> Table:
    """Legal schedules in which things wait."""
    stages, chunks, microbatches = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
    )
    return waiting_table(
        stages, chunks, microbatches, draw(st.booleans()), draw(st.randoms(use_true_random=False))
    )


def run(table: Table, weights: np.ndarray, entering: np.ndarray, leaving: np.ndarray) -> np.ndarray:
    """Gradients [stages, chunks] of a chain of scalar layers y = w x, computed as the table's
    arrays say.

    `entering` and `leaving` [microbatches] are inputs and output cotangents. Whatever is not there
    is NaN.
    """
    p, stages = table.stages, np.arange(table.stages)
    stash = np.full((p, table.slots + 1), np.nan)
    inputs = np.full((p, table.slots + 1), np.nan)
    cotangents = np.full((p, table.cotangent_slots + 1), np.nan)
    deferred = np.full((p, table.deferred_slots + 1), np.nan)
    activation = cotangent = np.full(p, np.nan)
    gradients = np.zeros((p, table.chunks))
    for tick in range(table.ticks):
        arrived, came_back = np.roll(activation, 1), np.roll(cotangent, -1)
        inputs[stages, table.arrive_forward_slot[tick]] = arrived
        cotangents[stages, table.arrive_backward_slot[tick]] = came_back
        microbatch, chunk = table.forward_microbatch[tick], table.forward_chunk[tick]
        x = inputs[stages, table.forward_slot[tick]] if table.activations_wait else arrived
        x = np.where((stages == 0) & (chunk == 0), entering[microbatch], x)
        stash[stages, table.forward_slot[tick]] = x
        activation = weights[stages, chunk] * x
        head = table.head_microbatch[tick]
        from_head = np.full(p, leaving[head] + 0 * activation[-1] if head >= 0 else np.nan)
        cotangents[stages, table.head_slot[tick]] = from_head
        chunk, runs = table.backward_chunk[tick], table.backward_microbatch[tick] >= 0
        last = (stages == p - 1) & (chunk == table.chunks - 1)
        dy = cotangents[stages, table.cotangent_slot[tick]]
        dy = dy if table.cotangent_slots else np.where(last, from_head, came_back)
        cotangent = weights[stages, chunk] * dy
        kept = stash[stages, table.backward_slot[tick]]
        deferred[stages, table.defer_slot[tick]] = dy
        if table.split:
            chunk, runs = table.weight_chunk[tick], table.weight_microbatch[tick] >= 0
            kept = stash[stages, table.weight_slot[tick]]
            dy = deferred[stages, table.resume_slot[tick]] if table.deferred_slots else dy
        gradients[stages, chunk] += np.where(runs, kept * dy, 0)
    return gradients


@FEWER
@given(table=st.one_of(tables(), waiting_tables()))
def test_what_the_arrays_say_computes_the_exact_gradients(table):
    random = np.random.default_rng(0)
    weights = random.uniform(0.5, 2.0, (table.stages, table.chunks))
    entering, leaving = random.normal(size=(2, table.microbatches))
    expected = weights.prod() / weights * (entering * leaving).sum()
    np.testing.assert_allclose(run(table, weights, entering, leaving), expected, rtol=1e-9)


@FEWER
@given(table=st.one_of(tables(), waiting_tables()), drawn=st.integers(0, 31))
def test_chunks_above_frozen_ones_keep_their_gradients(table, drawn):
    """And those below have none, and need neither more ticks nor more slots."""
    random = np.random.default_rng(0)
    weights = random.uniform(0.5, 2.0, (table.stages, table.chunks))
    entering, leaving = random.normal(size=(2, table.microbatches))
    frozen = drawn % (table.stages * table.chunks)
    left = without_backward_of(table, frozen)
    learns = passed_before(table.stages, table.chunks)[:, 0] >= frozen
    expected = np.where(learns, weights.prod() / weights * (entering * leaving).sum(), 0)
    np.testing.assert_allclose(run(left, weights, entering, leaving), expected, rtol=1e-9)
    assert left.ticks <= table.ticks and left.slots <= table.slots
    assert left.deferred_slots <= table.deferred_slots
    assert (left.backward_microbatch >= 0).sum() == table.microbatches * learns.sum()


@FEWER
@given(stages=stages_, microbatches=st.integers(1, 40), drawn=st.integers(0, 7))
def test_frozen_stages_leave_the_stash_and_the_ticks_of_the_first_one_that_learns(
    stages, microbatches, drawn
):
    frozen = drawn % stages
    for kind in (one_f_one_b, zero_bubble):
        table = without_backward_of(kind(stages, microbatches), frozen)
        assert table.slots == min(microbatches, 2 * (stages - 1 - frozen) + 1)
        assert table.ticks == max(microbatches + 2 * stages - 2 - frozen, microbatches + stages - 1)


@FEWER
@given(table=st.one_of(tables(), waiting_tables()))
def test_every_schedule_obeys_the_rules(table):
    check(table)
    for kind in ("forward", "backward") + ("weight",) * table.split:
        for stage in range(table.stages):
            cells = units_of(table, kind)[:, stage].tolist()
            units = [tuple(cell) for cell in cells if cell != [-1, -1]]
            assert sorted(units) == list(product(range(table.microbatches), range(table.chunks)))


@FEWER
@given(table=tables())
def test_in_schedules_built_here_hops_are_used_as_they_arrive(table):
    assert not table.activations_wait
    if table.kind == "gpipe":
        assert table.cotangent_slots == table.microbatches  # the head's: GPipe turns round late
    else:
        assert table.cotangent_slots == 0


@FEWER
@given(stages=stages_, chunks=chunks_, groups=st.integers(1, 4))
def test_interleaved_takes_the_ticks_and_the_stash_it_promises(stages, chunks, groups):
    microbatches = groups * stages
    table = interleaved(stages, microbatches, chunks)
    total = microbatches * chunks
    assert table.ticks == total + chunks * stages + stages - 2
    assert (table.forward_microbatch >= 0).any(1).sum() == total + stages - 1
    assert (table.backward_microbatch >= 0).any(1).sum() == total + stages - 1
    expected = [
        min(total, (chunks - 1) * stages + 2 * (stages - 1 - stage) + 1) for stage in range(stages)
    ]
    assert list(table.peak_stash) == expected
    assert table.slots == expected[0]


@FEWER
@given(stages=stages_, microbatches=st.integers(1, 40))
def test_with_one_chunk_any_number_of_microbatches_goes(stages, microbatches):
    table = one_f_one_b(stages, microbatches)
    assert table.peak_stash[0] == min(microbatches, 2 * stages - 1)
    assert table.ticks == microbatches + 2 * stages - 2
    alike = interleaved(stages, microbatches, 1)
    assert np.array_equal(alike.forward_microbatch, table.forward_microbatch)
    assert np.array_equal(alike.backward_slot, table.backward_slot)


@FEWER
@given(stages=stages_, microbatches=st.integers(1, 40))
def test_gpipe_stashes_all_microbatches_and_ends_forwards_before_backwards(stages, microbatches):
    table = gpipe(stages, microbatches)
    assert table.peak_stash == (microbatches,) * stages
    assert [
        (phase.start, phase.stop, phase.forward, phase.backward) for phase in phases(table)
    ] == [
        (0, table.ticks // 2, True, False),
        (table.ticks // 2, table.ticks, False, True),
    ]


@FEWER
@given(stages=st.integers(2, 8), chunks=chunks_, groups=st.integers(1, 4))
def test_interleaved_has_fill_steady_and_drain(stages, chunks, groups):
    total, turn = groups * stages * chunks, chunks * stages - 1
    table = interleaved(stages, groups * stages, chunks)
    fill, steady, drain = phases(table)
    assert (fill.start, fill.stop, fill.forward, fill.backward) == (0, turn, True, False)
    assert (steady.stop - steady.start, steady.forward, steady.backward) == (
        total - turn + stages - 1,
        True,
        True,
    )
    assert (drain.stop - drain.start, drain.forward, drain.backward) == (turn, False, True)
    assert not any(phase.weight for phase in phases(table))
    assert (fill.embed, fill.head, fill.arrive_forward, fill.arrive_backward) == (
        True,
        False,
        turn > 1,
        False,
    )
    assert (drain.embed, drain.head, drain.arrive_forward, drain.arrive_backward) == (
        False,
        False,
        False,
        True,
    )


@FEWER
@given(table=waiting_tables())
def test_phases_part_the_ticks_where_the_kinds_of_work_change(table):
    found = phases(table)
    assert [phase.start for phase in found] == [0, *(phase.stop for phase in found[:-1])]
    assert found[-1].stop == table.ticks
    for phase in found:
        for kind in ("forward", "backward", "weight"):
            present = (units_of(table, kind)[phase.start : phase.stop, :, 0] >= 0).any(1)
            assert present.all() if getattr(phase, kind) else not present.any()
        events = {
            "enter": table.entering_microbatch,
            "embed": table.embed_microbatch,
            "head": table.head_microbatch,
            "embed_backward": table.embed_backward_microbatch,
        }
        for flag, by_tick in events.items():
            assert getattr(phase, flag) == bool((by_tick[phase.start : phase.stop] >= 0).any())
    kinds = [(phase.forward, phase.backward, phase.weight) for phase in found]
    assert all(one != other for one, other in zip(kinds, kinds[1:], strict=False))


@FEWER
@given(stages=stages_, chunks=chunks_, groups=st.integers(1, 4))
def test_zero_bubble_holds_no_more_than_interleaved_and_ends_with_the_last_backward(
    stages, chunks, groups
):
    plain = interleaved(stages, groups * stages, chunks)
    split = zero_bubble(stages, groups * stages, chunks)
    assert split.split and not plain.split
    assert split.ticks == plain.ticks
    assert split.slots == plain.slots
    assert split.deferred_slots == (0 if stages == 1 else min(stages, groups * stages * chunks))


@FEWER
@given(table=waiting_tables())
def test_slots_are_as_few_as_live_units(table):
    assert table.slots == max(table.peak_stash)


def test_embedding_and_head_see_every_microbatch_once():
    for kind in SCHEDULE_KINDS:
        table = build(kind, 4, 8, 2 if kind == "interleaved" else 1)
        embedded = [table.entering_microbatch[0], *table.embed_microbatch]
        gradients = [*table.embed_backward_microbatch, table.leaving_microbatch[-1]]
        for by_tick in (embedded, table.head_microbatch, gradients):
            assert sorted(at for at in by_tick if at >= 0) == list(range(8)), kind


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "chunks", "says"),
    [
        ("interleaved", 4, 10, 2, "microbatches=8 or microbatches=12"),
        ("interleaved", 4, 3, 2, "try microbatches=4"),
        ("zero_bubble", 4, 10, 2, "microbatches=8 or microbatches=12"),
        ("1f1b", 4, 8, 2, "one chunk per stage; asked chunks=2; try 'interleaved'"),
        ("gpipe", 4, 8, 2, "one chunk per stage"),
        ("1f1b", 4, 0, 1, "microbatches=0"),
        ("interleaved", 0, 4, 1, "stages=0"),
        ("interleaved", 4, 4, 0, "chunks=0"),
        ("gpip", 4, 8, 1, "gpipe, 1f1b, interleaved, zero_bubble"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(kind, stages, microbatches, chunks, says):
    with pytest.raises(ConfigError, match=says):
        build(kind, stages, microbatches, chunks)


@pytest.mark.parametrize(("kind", "chunks"), [("interleaved", 3), ("zero_bubble", 2)])
def test_a_steady_tick_without_the_head_has_no_work_on_the_vocabulary(kind, chunks):
    phases = [
        phase
        for each in rounds(build(kind, 4, 128, chunks))
        for phase in each.phases
        if each.repeats > 1
    ]
    assert {phase.head for phase in phases} == {True, False}
    for phase in phases:
        assert phase.embed == phase.embed_backward == phase.head


def test_tables_cannot_be_written_to_and_compare_by_value():
    table = one_f_one_b(2, 4)
    assert table == one_f_one_b(2, 4)
    assert table != one_f_one_b(2, 5)
    with pytest.raises(ValueError, match="read-only"):
        table.forward_slot[0, 0] = 1


@FEWER
@given(st.one_of(tables(), waiting_tables()))
def test_rounds_go_through_every_tick_once_with_all_work_that_a_tick_has(table):
    work = {
        kind: (units_of(table, kind)[..., 0] >= 0).any(1)
        for kind in ("forward", "backward", "weight")
    }
    work |= {"enter": table.entering_microbatch >= 0, "embed": table.embed_microbatch >= 0}
    work["head"] = table.head_microbatch >= 0
    work["embed_backward"] = table.embed_backward_microbatch >= 0
    tick = 0
    for each in rounds(table):
        assert each.phases[0].start == tick
        for _ in range(each.repeats):
            for phase in each.phases:
                for at in range(tick, tick := tick + phase.stop - phase.start):
                    assert all(getattr(phase, kind) for kind in work if work[kind][at])
    assert tick == table.ticks


@pytest.mark.parametrize(
    ("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 2)]
)
def test_rounds_do_not_grow_with_microbatches_and_the_head_runs_for_nothing_in_no_tick(
    kind, chunks
):
    few, many = (build(kind, 4, microbatches, chunks) for microbatches in (16, 128))
    assert [len(each.phases) for each in rounds(few)] == [len(each.phases) for each in rounds(many)]
    assert sum(len(each.phases) for each in rounds(many)) <= 7
    ticks = sum(
        each.repeats * (phase.stop - phase.start)
        for each in rounds(many)
        for phase in each.phases
        if phase.head
    )
    assert ticks == 128
