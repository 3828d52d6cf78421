"""Prices of schedules: closed formulas where there are some, published bubble rates where runs were
profiled.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.config.errors import ConfigError
from spmdtrain.pipeline.schedule import build, gpipe, interleaved, one_f_one_b, zero_bubble
from spmdtrain.pipeline.timing import (
    Operation,
    Times,
    bubble_over_ideal,
    lockstep_idle,
    lockstep_spans,
    lockstep_ticks,
    lockstep_time,
    megatron_orders,
    order_idle,
    order_spans,
    order_time,
    table_orders,
    zb_h1_orders,
)

FEWER = settings(max_examples=60)

# Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (version with ZB-V): p,
# m, v of 1F1B-I (one layer per chunk), profiled ms (F, B, W, hop) of table 9, and the rates of
# table 5 for 1F1B, 1F1B-I and ZB-H1.
PUBLISHED = {
    "1.5B, 24": (8, 24, 3, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 0.1585),
    "1.5B, 32": (8, 32, 3, (18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 0.1242),
    "1.5B, 64": (8, 64, 3, (18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 0.0674),
    "6.2B, 24": (8, 24, 4, (29.718, 29.444, 19.927, 0.527), 0.2347, 0.0808, 0.1323),
    "6.2B, 32": (8, 32, 4, (29.802, 29.428, 19.530, 0.577), 0.1898, 0.0628, 0.1045),
    "6.2B, 64": (8, 64, 4, (29.935, 29.621, 19.388, 0.535), 0.1091, 0.0320, 0.0554),
    "14.6B, 48": (16, 48, 3, (11.347, 11.248, 8.132, 0.377), 0.2552, 0.1104, 0.1397),
    "14.6B, 64": (16, 64, 3, (11.307, 11.254, 8.101, 0.379), 0.2082, 0.0852, 0.1088),
    "14.6B, 128": (16, 128, 3, (11.325, 11.308, 8.109, 0.378), 0.1251, 0.0445, 0.0576),
    "28.3B, 96": (32, 96, 2, (10.419, 10.207, 7.715, 0.408), 0.2646, 0.1493, 0.1421),
    "28.3B, 128": (32, 128, 2, (10.408, 10.204, 7.703, 0.408), 0.2168, 0.1164, 0.1106),
    "28.3B, 256": (32, 256, 2, (10.402, 10.248, 7.698, 0.460), 0.1352, 0.0624, 0.0594),
}

costs = st.floats(0.1, 10.0)


@pytest.mark.parametrize("run", PUBLISHED)
def test_1f1b_and_zb_h1_give_the_published_bubble_rates_to_four_digits(run):
    stages, microbatches, _, profiled, published, _, published_h1 = PUBLISHED[run]
    times = Times(*profiled)
    assert round(sum(order_idle(megatron_orders(stages, microbatches), times)), 4) == published
    assert round(sum(order_idle(zb_h1_orders(stages, microbatches), times)), 4) == published_h1


@pytest.mark.parametrize("run", PUBLISHED)
def test_interleaved_gives_the_published_bubble_rates_within_four_thousandths(run):
    stages, microbatches, chunks, profiled, _, published, _ = PUBLISHED[run]
    times = Times(*profiled)
    rate = sum(order_idle(megatron_orders(stages, microbatches, chunks), times))
    assert abs(rate - published) < 0.004
    # What is left of the difference: the published rates leave one hop per stage out.
    work = microbatches * times.microbatch
    time = work / (1 - rate) - stages * times.hop
    assert 1 - work / time == pytest.approx(published, abs=1.5e-4)


@FEWER
@given(
    stages=st.integers(1, 8),
    chunks=st.integers(1, 4),
    groups=st.integers(1, 5),
    forward=costs,
    backward=costs,
)
def test_interleaved_wastes_the_ideal_share_of_narayanan(stages, chunks, groups, forward, backward):
    table, microbatches = interleaved(stages, groups * stages, chunks), groups * stages
    times = Times(forward, backward / 2, backward / 2)
    expected = (stages - 1) / (chunks * microbatches)
    assert bubble_over_ideal(table, times) == pytest.approx(expected, abs=1e-12)
    bubble = lockstep_idle(table, times).bubble
    assert bubble == pytest.approx(expected / (1 + expected), abs=1e-12)


@FEWER
@given(
    stages=st.integers(2, 6),
    chunks=st.integers(2, 23),
    groups=st.integers(1, 5),
    hop=st.floats(0.0, 3.0),
)
def test_more_chunks_never_have_a_larger_bubble_whatever_a_hop_takes(stages, chunks, groups, hop):
    """What hops add, and more chunks have more of them, is no bubble."""
    times = Times(1.0, 1.0, 1.0, hop)
    plain = lockstep_idle(one_f_one_b(stages, groups * stages), times)
    table = interleaved(stages, groups * stages, chunks)
    idle = lockstep_idle(table, times)
    assert idle.bubble < plain.bubble and idle.hops >= plain.hops - 1e-12
    work = table.microbatches * times.microbatch
    assert sum(idle) == pytest.approx(1 - work / lockstep_time(table, times))


@FEWER
@given(
    stages=st.integers(1, 8),
    microbatches=st.integers(1, 30),
    forward=costs,
    backward=costs,
    weight=costs,
)
def test_the_bubbles_of_gpipe_1f1b_and_zero_bubble(stages, microbatches, forward, backward, weight):
    times = Times(forward, backward, weight)

    def idle(table):
        return lockstep_time(table, times) - microbatches * times.microbatch

    assert idle(gpipe(stages, microbatches)) == pytest.approx((stages - 1) * times.microbatch)
    assert idle(one_f_one_b(stages, microbatches)) == pytest.approx((stages - 1) * times.microbatch)
    assert idle(zero_bubble(stages, microbatches)) == pytest.approx(
        (stages - 1) * (forward + backward)
    )


@pytest.mark.parametrize("stages", range(2, 9))
def test_zero_bubble_idles_strictly_less_than_1f1b(stages):
    for microbatches in range(1, 33):
        plain, split = one_f_one_b(stages, microbatches), zero_bubble(stages, microbatches)
        equal = Times(1.0, 1.0, 1.0)
        assert lockstep_idle(split, equal).bubble < lockstep_idle(plain, equal).bubble
        assert bubble_over_ideal(split, equal) == pytest.approx(
            2 / 3 * bubble_over_ideal(plain, equal)
        )


def test_a_hop_sticks_out_only_where_there_is_no_work_beside_it():
    table, times = one_f_one_b(3, 6), Times(1.0, 1.0, 1.0, hop=0.5)
    extra = lockstep_ticks(table, times) - lockstep_ticks(table, Times())
    # Fill: two ticks. Steady: none; its last cotangent, like those of the drain, meets no forward.
    # Last tick: no hop.
    assert extra.tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0.5, 0.5, 0]
    bare = lockstep_ticks(table, times, overlap=0.0) - lockstep_ticks(table, Times())
    assert bare.tolist() == [0.5, 0.5, 1, 1, 1, 1, 1, 0.5, 0.5, 0]
    half = lockstep_ticks(table, times, overlap=0.5) - lockstep_ticks(table, Times())
    # Steady ticks: half of an activation's hop and half of a cotangent's.
    assert half.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0]
    assert lockstep_time(one_f_one_b(1, 6), times) == lockstep_time(one_f_one_b(1, 6), Times())
    wrapped = interleaved(1, 6, 2)  # one stage hands its chunks to itself
    assert lockstep_time(wrapped, times) == lockstep_time(wrapped, Times())
    # The backward hides 2.0 of an activation's, the forward 1.0 of a cotangent's.
    slow = Times(1.0, 1.0, 1.0, hop=2.5)
    assert (lockstep_ticks(table, slow) - lockstep_ticks(table, Times())).tolist()[3] == 0.5 + 1.5


@FEWER
@given(
    kind=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
    stages=st.integers(1, 5),
    groups=st.integers(1, 3),
    hop=st.floats(0, 2),
)
def test_without_lockstep_no_table_is_slower_and_no_stage_works_at_two_things(
    kind, stages, groups, hop
):
    table = build(kind, stages, groups * stages, 2 if kind == "interleaved" else 1)
    times = Times(1.0, 1.5, 0.7, hop)
    assert order_time(table_orders(table), times) <= lockstep_time(table, times, overlap=0.0) + 1e-9
    for spans in (lockstep_spans(table, times), order_spans(table_orders(table), times)):
        for stage in range(stages):
            own = sorted((span.start, span.stop) for span in spans if span.stage == stage)
            assert all(one[1] <= other[0] + 1e-9 for one, other in zip(own, own[1:], strict=False))
            busy = sum(stop - start for start, stop in own)
            assert busy == pytest.approx(table.microbatches * times.microbatch)


def test_one_op_per_tick_and_paired_interleaving_cost_the_same_without_hops():
    for stages, microbatches, chunks in ((4, 16, 1), (4, 16, 2), (8, 32, 4), (4, 4, 2)):
        megatron = order_idle(megatron_orders(stages, microbatches, chunks), Times())
        paired = lockstep_idle(interleaved(stages, microbatches, chunks))
        assert megatron == pytest.approx(paired)


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_when_all_passes_cost_the_same():
    cost = order_time(zb_h1_orders(4, 12), Times())
    assert cost - 12 * 3 == pytest.approx((4 - 1) * (1 + 1 - 1))
    for stage, order in enumerate(zb_h1_orders(4, 12)):
        held = np.cumsum(
            [{"forward": 1, "backward": 0, "weight": -1}[operation.kind] for operation in order]
        )
        assert held.max() == 4, stage


def test_orders_that_wait_for_each_other_are_refused():
    forward, backward = Operation("forward", 0, 0), Operation("backward", 0, 0)
    with pytest.raises(ConfigError, match="wait for each other"):
        order_time([[backward, forward], [forward, backward]], Times())
    with pytest.raises(ConfigError, match="microbatches % stages"):
        megatron_orders(4, 6, 2)
