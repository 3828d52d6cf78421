"""Seconds of single collectives."""

import pytest

from spmdtrain.planner.cost.collective_time import all_gather_seconds, all_reduce_seconds
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.workload import Group

A100 = DEVICES["a100-80"]


def test_the_latency_of_a_sum_over_hosts_grows_with_their_logarithm():
    few, many = (all_reduce_seconds(0, Group(hosts, 8), A100) for hosts in (8, 64))
    assert few == pytest.approx(2 * 3 * A100.network_latency)
    assert many == pytest.approx(2 * few)


@pytest.mark.parametrize("group", [Group(8, 1), Group(2, 8), Group(1, 1)])
def test_a_sum_takes_no_longer_than_a_scatter_and_a_gather(group):
    ring = 2 * all_gather_seconds(1e9, group, A100)
    assert 0.99 * ring <= all_reduce_seconds(1e9, group, A100) <= ring
