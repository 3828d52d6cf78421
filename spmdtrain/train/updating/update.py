"""Judges a step, and updates all parameters by its gradients."""

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import RunConfig
from spmdtrain.train.items import spikes
from spmdtrain.train.items.items import unless_skipped
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.optimizers import OptimizerState
from spmdtrain.train.updating.streamed import streamed_updates


def update(
    setup: Setup,
    gradients: dict[str, jax.Array],
    state: TrainState,
    rate: jax.Array,
    good: jax.Array | None,
) -> tuple[dict, OptimizerState]:
    """Returns (updates, new optimizer state), sharded like the parameters.

    The rules see no padding: a mean over a layer's weights must not count it. If `good` is false,
    the state is the old one.
    """
    padding = setup.padding
    there, after_there = streamed_updates(setup, gradients, state.opt_state, state.params, good)
    rules = {path: rule for path, rule in setup.update_rules.items() if path not in there}
    before = {path: state.opt_state[path] for path in rules}
    updates, opt_state = optimizers.updates(
        rules,
        setup.model.parameters,
        {path: padding.from_rest(path, gradients[path]) for path in rules},
        {path: padding.tree_from_rest(path, tree) for path, tree in before.items()},
        {path: padding.from_rest(path, x) for path, x in state.params.items()},
        rate,
    )
    updates = {path: padding.to_rest(path, x) for path, x in updates.items()} | there
    after = {path: padding.tree_to_rest(path, tree) for path, tree in opt_state.items()}
    if good is not None:
        after = unless_skipped(good, after, before)
    after |= after_there
    if setup.frozen:
        updates = _above(setup, updates)
    return updates, {path: after[path] for path in setup.update_rules}


def _above(setup: Setup, updates: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the updates without those of the frozen layers, and of what only embeds tokens.

    These have no gradient, but a rule's weight decay and its momentum of an earlier stage would
    move them all the same.
    """
    below = setup.model.below_the_stack(setup.config)
    learns = jnp.asarray(setup.model.stage_layout.numbers >= setup.frozen)

    def above(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(learns, range(learns.ndim, x.ndim)), x, 0)

    cut = {path: above(x) if setup.model.in_stack(path) else x for path, x in updates.items()}
    return cut | {path: jnp.zeros_like(cut[path]) for path in below & cut.keys()}


def judge(
    config: RunConfig, before: TrainState, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest loss and gradient norm of a good step, [2], and whether this is one."""
    most = spikes.limits(config.guard, before.items.get(spikes.ITEM.name))
    return most, spikes.is_good(jnp.stack([loss, grad_norm]), most)
