"""The checkpoint interval: least loss where the formula says, and the published failure rate."""

import numpy as np
import pytest

from spmdtrain.train.interval import best_interval, lost_share, seconds_between_failures


@pytest.mark.parametrize(("save", "between"), [(10.0, 10_000.0), (60.0, 20_000.0), (1.0, 1e6)])
def test_no_other_interval_loses_noticeably_less(save, between):
    best = best_interval(save, between)
    others = np.geomspace(best / 5, best * 5, 400)
    least = min(lost_share(other, save, between) for other in others)
    assert lost_share(best, save, between) <= least * 1.01
    assert best == pytest.approx((2 * save * between) ** 0.5, rel=0.1)


def test_a_job_of_16384_devices_fails_every_three_hours_as_published():
    assert seconds_between_failures(16_384) == pytest.approx(54 * 24 * 3600 / 419, rel=0.01)


def test_where_a_save_takes_longer_than_failures_let_it_one_saves_once_between_them():
    assert best_interval(100.0, 40.0) == 40.0
