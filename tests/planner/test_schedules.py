"""Closed forms of schedules: each equals its table, or the simulated order."""

from collections.abc import Iterator
from itertools import product

import pytest

from spmdtrain.config import ConfigError
from spmdtrain.pipeline import schedule, timing
from spmdtrain.planner.cost.schedules import SCHEDULES, Pipeline, lockstep_seconds


def tables() -> Iterator[tuple[str, Pipeline, schedule.Table]]:
    """Small tables of every schedule that has a name."""
    for kind, p, m, v in product(schedule.SCHEDULE_KINDS, (2, 3, 4), (1, 2, 4, 6, 12), (1, 2, 3)):
        try:
            table = schedule.build(kind, p, m, v)
        except ConfigError:  # chunks where there are none, or microbatches not in groups
            continue
        yield kind, Pipeline(p, m, v), table


@pytest.mark.parametrize(("hop", "overlap"), [(0.0, 1.0), (0.3, 1.0), (5.0, 1.0), (0.3, 0.4)])
def test_lockstep_seconds_are_those_of_the_table(hop, overlap):
    times = timing.Times(0.7, 1.1, 0.4, hop)
    checked = 0
    for kind, pipeline, table in tables():
        seconds = timing.lockstep_time(table, times, overlap)
        assert lockstep_seconds(kind, pipeline, times, overlap) == pytest.approx(seconds)
        checked += 1
    assert checked > 33


def test_ring_slots_are_those_of_the_table():
    for kind, pipeline, table in tables():
        stash = table.slots + 1
        cotangents = table.cotangent_slots + 1 if table.cotangent_slots else 0
        deferred = table.deferred_slots + 1 if table.deferred_slots else 0
        slots = SCHEDULES[kind].ring_slots(pipeline)
        assert slots == (stash, cotangents, deferred), (kind, pipeline)


@pytest.mark.parametrize(
    ("kind", "p", "m", "v"),
    [("1f1b", 4, 8, 1), ("1f1b", 8, 24, 1), ("interleaved", 4, 8, 2), ("zero_bubble", 8, 24, 1)],
)
def test_bubbles_of_orders_are_those_simulated(kind, p, m, v):
    times = timing.Times(1.0, 1.1, 0.7)
    if kind == "zero_bubble":
        orders = timing.zb_h1_orders(p, m)
    else:
        orders = timing.megatron_orders(p, m, v)
    simulated = timing.order_time(orders, times) - m * times.microbatch
    bubble = SCHEDULES[kind].order_bubble(Pipeline(p, m, v), times)
    assert bubble == pytest.approx(simulated)


def test_every_schedule_that_has_a_name_has_closed_forms():
    for kind in schedule.SCHEDULE_KINDS:
        assert SCHEDULES[kind].first_backward(Pipeline(2, 4, 1)) > 0
        assert SCHEDULES[kind].ring_slots(Pipeline(2, 4, 1)).stash > 0
