"""Figures of two steps, beside what rounding does to them."""

import math

import numpy as np
import pytest

from spmdtrain.lab.certify.compare import (
    BATCH,
    GRADIENT,
    MARGIN,
    NUMBER,
    Figures,
    Floors,
    differences,
    figures_of,
    first_of,
    raised_floors,
    unequal,
)
from spmdtrain.train.compared.in_order import OPTIMIZER, WEIGHT, Leaf

G, W, COUNT = Leaf(GRADIENT, "a"), Leaf(WEIGHT, "a"), Leaf(OPTIMIZER, "a", ".count")
RANDOM = np.random.default_rng(0)
BEFORE = {W: RANDOM.standard_normal(50).astype("float32"), COUNT: np.int32(3)}
GRADIENTS = RANDOM.standard_normal(50).astype("float32")


def step(gradient=GRADIENTS, moved=-0.01, count=4, **numbers) -> Figures:
    after = {W: (BEFORE[W] + moved * gradient).astype("float32"), COUNT: np.int32(count)}
    told = {"loss": 4.0, "tokens": 384.0, "grad_norm": 7.0} | numbers
    return figures_of(BEFORE, after, {GRADIENT: {"a": gradient}}, told)


def floors_of(*siblings: Figures) -> Floors:
    floors = Floors({}, {})
    for sibling in siblings:
        floors = raised_floors(floors, sibling, step())
    return floors


def wrong(got: Figures, floors: Floors | None = None) -> list[Leaf]:
    found = differences(0, got, step(), floors or floors_of())
    return sorted(each.leaf for each in found if each.is_wrong)


def off_by(share: float) -> np.ndarray:
    return (GRADIENTS * (1 + share)).astype("float32")


def test_the_same_step_agrees():
    assert wrong(step()) == []
    assert all(each.ratio == 0 for each in differences(0, step(), step(), floors_of()))


def test_rounding_agrees_and_a_hundred_thousandth_does_not():
    assert wrong(step(off_by(2.0**-23))) == []
    assert wrong(step(off_by(1e-5))) == [G]  # the weight is stored more coarsely than that
    assert wrong(step(off_by(1e-3))) == sorted([G, W])


def test_a_leaf_that_rounding_moves_far_may_differ_by_that():
    floors = floors_of(step(off_by(1e-3)))
    assert wrong(step(off_by(0.5 * MARGIN * 1e-3)), floors) == []
    assert wrong(step(off_by(2 * MARGIN * 1e-3)), floors) == sorted([G, W])


def test_counts_are_equal_and_losses_within_rounding():
    assert wrong(step(loss=4.0 + 1e-6)) == []
    assert wrong(step(loss=4.001)) == [Leaf(NUMBER, "loss")]
    assert wrong(step(tokens=383.0)) == [Leaf(NUMBER, "tokens")]
    assert wrong(step(count=5)) == [COUNT]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_wrong(bad):
    broken = step()
    broken.arrays[G][3] = bad
    assert wrong(broken) == [G]
    assert wrong(step(loss=bad)) == [Leaf(NUMBER, "loss")]


def test_a_leaf_that_is_missing_or_of_another_shape_is_wrong():
    short = step()
    del short.arrays[G]
    assert wrong(short) == [G]
    other = step()
    other.arrays[G] = other.arrays[G].reshape(5, 10)
    assert wrong(other) == [G]


def test_a_leaf_of_zeros_may_hold_what_rounding_leaves_there():
    zero, dust = np.zeros(50, "float32"), np.full(50, 1e-12, "float32")
    want, got = step(), step()
    leaf = Leaf(GRADIENT, "bias")
    for figures, x in ((want, zero), (got, dust)):
        figures.arrays[leaf], figures.fine[leaf] = x.astype("float64"), 2.0**-24
    assert not any(each.is_wrong for each in differences(0, got, want, floors_of()))
    got.arrays[leaf] = np.full(50, 1e-6)
    assert [each.leaf for each in differences(0, got, want, floors_of()) if each.is_wrong] == [leaf]


def test_what_differs_first_in_the_order_of_the_step_is_named():
    found = [each for each in differences(1, step(off_by(0.1)), step(), floors_of())]
    late = [each for each in found if each.is_wrong]
    assert first_of(late).leaf == G
    assert first_of([*late, *unequal(1, BATCH, ["samples"])]).leaf.kind == BATCH
    assert math.isinf(first_of(unequal(0, BATCH, ["samples"])).ratio)
