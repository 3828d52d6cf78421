"""The checkpoint interval: it loses least, and failures come as often as published."""

import numpy as np
import pytest

from spmdtrain.checkpoints.intervals import (
    best_interval,
    lost_share,
    plan_checkpoints,
    seconds_between_failures,
)


@pytest.mark.parametrize(("save", "between"), [(10.0, 10_000.0), (60.0, 20_000.0), (1.0, 1e6)])
def test_no_other_interval_loses_noticeably_less(save, between):
    best = best_interval(save, between)
    others = np.geomspace(best / 5, best * 5, 400)
    least = min(lost_share(other, save, between) for other in others)
    assert lost_share(best, save, between) <= least * 1.01
    assert best == pytest.approx((2 * save * between) ** 0.5, rel=0.1)


def test_a_run_on_16384_devices_fails_every_three_hours_as_published():
    assert seconds_between_failures(16_384) == pytest.approx(54 * 24 * 3600 / 419, rel=0.01)


def test_where_saves_outlast_failures_the_interval_is_the_time_between_failures():
    assert best_interval(100.0, 40.0) == 40.0


@pytest.mark.parametrize("step_seconds", [1.0, 1e9])
def test_saves_are_whole_steps_apart(step_seconds):
    found = plan_checkpoints(step_seconds, save_seconds=10.0, devices=1000)
    best_steps = best_interval(10.0, seconds_between_failures(1000)) / step_seconds
    assert found.every == max(1, round(best_steps))
    interval = found.every * step_seconds
    assert found.lost_share == lost_share(interval, 10.0, found.seconds_between_failures)
