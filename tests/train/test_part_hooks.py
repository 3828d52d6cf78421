"""A part changes gradients after clipping, and its item knows the step; its key is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import batches_of, prepared, tiny

import spmdtrain as st
from spmdtrain.models.context import part_key, random_key
from spmdtrain.train import all_parts
from spmdtrain.train.all_parts import Feature
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.items import ema
from spmdtrain.train.items.item import Item, Projected, Taken, whole
from spmdtrain.train.part import Graded, Params, Part

SMALL = (
    *("model.embed=8", "model.heads=2", "train.sequence_length=4", "train.global_batch=8"),
    *("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.schedule=constant"),
    *("optimizer.warmup=0", "optimizer.learning_rate=20", "train.clip=0.1"),
)
LAYOUTS = {"one device": (), "a mesh": ("mesh.data=2", "mesh.tensor=2")}


def doubled(graded: Graded) -> Params:
    """Also tells that the norm is the one before clipping, and that the item is the old one."""
    factor = 2.0 + 0.0 * (graded.norm + graded.items["numbers"]["sum"])
    return {path: factor * x for path, x in graded.gradients.items()}


NUMBERS = Item(
    "numbers",
    begin=lambda start: {"sum": jnp.float32(0)},  # noqa: ARG005
    rests=whole,
    update=lambda value, taken: {"sum": value["sum"] + taken.step},
    figures={"number": lambda value, taken: taken.step.astype(jnp.float32)},  # noqa: ARG005
)
DOUBLING = Part("doubling", items=(NUMBERS,), make_gradients=lambda setup: doubled)  # noqa: ARG005


def two_steps(*settings: str):
    """(weights before, after the first step, state after the second, figures of both)."""
    setup = prepared(*SMALL, *settings)
    step = st.make_step(setup)
    state = st.init_state(setup)
    before = plain_arrays(setup, state.params)
    with batches_of(setup) as ahead:
        state, first = step(state, next(ahead))
        after = plain_arrays(setup, state.params)
        state, second = step(state, next(ahead))
    return before, after, state, (first, second)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_part_and_its_item_knows_the_step(layout, monkeypatch):
    before, plain, _, figures_without = two_steps()
    feature = Feature(lambda _: True, lambda: DOUBLING, ("numbers",))
    monkeypatch.setattr(all_parts, "FEATURES", (*all_parts.FEATURES, feature))
    _, after, state, figures = two_steps(*LAYOUTS[layout])
    for path, x in before.items():
        moved = plain[path] - x
        largest = np.abs(moved).max()
        np.testing.assert_allclose(
            after[path] - x, 2 * moved, rtol=0, atol=1e-5 * largest + 4e-7, err_msg=path
        )
    np.testing.assert_allclose(figures[0]["grad_norm"], figures_without[0]["grad_norm"], rtol=1e-5)
    assert [float(step["number"]) for step in figures] == [0, 1]
    assert float(state.items["numbers"]["sum"]) == 1


def test_each_part_and_each_step_has_a_key_of_its_own():
    keys = [part_key(0, name, jnp.int32(step)) for name in ("a", "b") for step in (0, 1)]
    keys += [part_key(1, "a", jnp.int32(0)), random_key(0, "noise"), random_key(0, "part")]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys)


def test_an_element_that_some_item_holds_at_zero_has_no_average():
    weights = {"held": jnp.array([1.0, 0.0]), "free": jnp.array([3.0])}
    zeros = {"held": jnp.array([True, False])}
    figures = {"loss": jnp.float32(0), "grad_norm": jnp.float32(0), "number": jnp.float32(1)}
    projected = Projected(None, weights, {}, zeros=zeros)
    taken = Taken(
        tiny("optimizer.ema=0.5"),
        weights,
        {},
        {},
        **figures,
        made={"other": 1, "holder": projected},
    )
    averages = {"held": jnp.array([1.0, 7.0]), "free": jnp.array([1.0])}
    after = ema.ITEM.update(averages, taken)
    assert {path: x.tolist() for path, x in after.items()} == {"held": [1, 0], "free": [2]}
