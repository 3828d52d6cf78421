"""What is random in a step depends on the seed, the step and the sample, with and without a
pipeline.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import batches_of, prepared

from spmdtrain.train.fresh import init_state
from spmdtrain.train.step import make_gradients

LAYOUTS = {"one device": (), "pipeline": ("mesh.pipeline=2", "train.microbatch=4")}
SMALL = (
    "model.embed=8",
    "model.heads=2",
    "train.sequence_length=4",
    "train.global_batch=8",
    "model.dropout=0.5",
)


def losses(layout: str, seed: int) -> list[float]:
    """Of one batch and the weights of seed 0, with the noise of `seed` at the first two steps."""
    setup, start = (prepared(*SMALL, *LAYOUTS[layout], f"train.seed={each}") for each in (seed, 0))
    find = jax.jit(make_gradients(setup))
    state = init_state(start)
    with batches_of(start) as ahead:
        batch = next(ahead)
    return [float(find(state.params, jnp.int32(step), batch)[1]["loss"]) for step in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_noise_differs_from_step_to_step_and_from_seed_to_seed(layout):
    assert len({*losses(layout, 0), *losses(layout, 1)}) == 4


def test_seeds_begin_with_weights_of_their_own():
    setups = [prepared(f"train.seed={seed}") for seed in (0, 1)]
    states = [init_state(setup) for setup in setups]
    for path, x in states[0].params.items():
        same = np.array_equal(x, states[1].params[path])
        assert same == (np.unique(x).size == 1), path  # ones and zeros are no draws
