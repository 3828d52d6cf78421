"""Pipelined gradients equal those of one device on a grid of layouts; a few are drawn, `make
test-slow` runs it all.
"""

import itertools
import random

import jax
import pytest
from helpers import assert_gradients_of_one_device, pipeline, pipeline_name

pytestmark = pytest.mark.long

TOLERANCE = 1e-5  # float32
SIX = ("model.layers=6",)  # some places are padding where p v does not divide it

MESHES = [
    *[
        (2, axes)
        for count in range(3)
        for axes in itertools.combinations(("data", "fsdp", "tensor"), count)
    ],
    *[
        (4, axes)
        for count in range(2)
        for axes in itertools.combinations(("data", "fsdp", "tensor"), count)
    ],
    (8, ()),
]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]
SPLIT = [("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 3)]
REMAT = ("none", "dots", "full")
GRID = [
    (stages, axes, schedule, chunks, turns, remat)
    for stages, axes in MESHES
    for turns in (1, 2, 4)
    for (schedule, chunks), remat in [
        *itertools.product(SCHEDULES, REMAT),
        *[(split, "none") for split in SPLIT],
    ]
]
DRAWN = random.Random(3).sample(GRID, 6)


@pytest.mark.parametrize("case", DRAWN, ids=pipeline_name)
def test_gradients_are_those_of_one_device_on_cases_drawn_from_the_grid(case):
    assert_gradients_of_one_device(SIX, pipeline(*case), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in GRID if case not in DRAWN], ids=pipeline_name)
def test_gradients_are_those_of_one_device_on_the_whole_grid(case):
    assert_gradients_of_one_device(SIX, pipeline(*case), TOLERANCE)
    jax.clear_caches()
