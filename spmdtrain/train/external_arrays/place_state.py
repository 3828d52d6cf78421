"""Puts a state that a caller made or changed onto the devices of a setup."""

import jax
import jax.numpy as jnp

from spmdtrain.config.arguments import as_whole
from spmdtrain.train.external_arrays.check_arrays import check_state
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState


def placed(setup: Setup, state: TrainState) -> TrainState:
    """Returns a copy of a state that a caller made or changed, in the shards of this setup.

    Raises ConfigError if it does not fit this setup: another leaf, shape or dtype.
    """
    check_setup(setup)
    check_state(setup, state)
    as_whole(state.step, "state.step", 0)
    shardings = jax.tree.map(lambda x: x.sharding, setup.state)
    leaves = jax.tree.leaves(state)
    here = jax.device_put(jax.tree.unflatten(jax.tree.structure(setup.state), leaves), shardings)
    # A copy: a step donates its argument, and the caller keeps the original.
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(here)
