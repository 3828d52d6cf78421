"""A state as plain arrays that do not depend on the mesh, and the step that shows what it does."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import assert_same_bits, batches_of, compiled_step, mesh_of, tiny

from spmdtrain.train.compared.in_order import (
    OPTIMIZER,
    STEP,
    Leaf,
    placed_state,
    plain_arrays,
    plain_state,
)
from spmdtrain.train.compared.watched import make_watched_step
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard

# A vocabulary and layers that no mesh divides, a factored optimizer, an average, limits of spikes.
UNEVEN = (
    "model.layers=3",
    "model.vocab=67",
    "optimizer.ema=0.9",
    "optimizer.name=adafactor",
    "guard.policy=skip",
    "guard.sigmas=6",
)
PLACES = {
    "zero": ("mesh.data=2", "mesh.tensor=2", "train.zero=1"),
    "pipeline": (
        "mesh.pipeline=2",
        "mesh.tensor=2",
        "train.microbatch=2",
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
    ),
}


@cache
def uneven(*place: str) -> Setup:
    return shard(tiny(*UNEVEN, *place), devices=jax.devices()[: mesh_of(place)])


@pytest.mark.seconds
@pytest.mark.parametrize("place", PLACES)
def test_a_state_goes_through_another_layout_and_comes_back(place):
    one, other = uneven(), uneven(*PLACES[place])
    plain = plain_state(one, init_state(one))
    random = np.random.default_rng(0)
    drawn = {leaf: random.permutation(x.ravel()).reshape(x.shape) for leaf, x in plain.items()}
    there = placed_state(other, drawn)
    for x, asked in zip(jax.tree.leaves(there), jax.tree.leaves(other.state), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (asked.shape, asked.dtype, asked.sharding)
    assert_same_bits(plain_state(other, there), drawn)
    assert_same_bits(plain_state(one, placed_state(one, drawn)), drawn)


@pytest.mark.seconds
@pytest.mark.parametrize("place", PLACES)
def test_a_layout_begins_with_the_plain_state_of_one_device(place):
    one, other = uneven(), uneven(*PLACES[place])
    want = plain_state(one, init_state(one))
    assert_same_bits(plain_state(other, init_state(other)), want)
    assert any(leaf.kind == OPTIMIZER and "_row" in leaf.place for leaf in want), "factored"


@pytest.mark.long
def test_the_watched_step_is_the_step_and_shows_what_moves_the_weights():
    settings = ("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0")
    place = ("mesh.data=2", "mesh.fsdp=2", "train.zero=1", "train.clip=1e-3")
    setup = shard(tiny(*settings, *place), devices=jax.devices()[:4])
    with batches_of(setup) as ahead:
        batch = next(ahead)
    state = init_state(setup)
    after, metrics, watched = make_watched_step(setup)(state, batch)
    gradients = plain_arrays(setup, watched.gradients)
    norm = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values()))
    assert norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    rate = float(metrics["learning_rate"])
    before, later = plain_state(setup, state), plain_state(setup, after)
    assert (before[Leaf(STEP)], later[Leaf(STEP)]) == (0, 1)
    for path, update in plain_arrays(setup, watched.updates).items():
        np.testing.assert_allclose(update, gradients[path] * 1e-3 / norm, rtol=1e-4, atol=1e-9)
        moved = before[Leaf("weight", path)] - later[Leaf("weight", path)]
        np.testing.assert_allclose(moved, rate * update, rtol=0, atol=2e-7)
    ours, figures = compiled_step(*settings, *place)(state, batch)
    assert_same_bits((ours, figures), (after, metrics))
