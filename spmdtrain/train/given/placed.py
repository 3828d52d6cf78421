"""A state that a caller has made or changed, put where a step wants it."""

import jax
import jax.numpy as jnp

from spmdtrain.config.given import as_whole
from spmdtrain.train.given.arrays import check_state
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState


def placed(setup: Setup, state: TrainState) -> TrainState:
    """A copy of a state that a caller has made or changed, in the shards of this setup.

    ConfigError if it is not one of this setup: another leaf, shape or dtype.
    """
    check_setup(setup)
    check_state(setup, state)
    as_whole(state.step, "state.step", 0)
    shardings = jax.tree.map(lambda x: x.sharding, setup.state)
    leaves = jax.tree.leaves(state)
    here = jax.device_put(jax.tree.unflatten(jax.tree.structure(setup.state), leaves), shardings)
    # A copy: a step donates what it is given, and the caller's own stays.
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(here)
