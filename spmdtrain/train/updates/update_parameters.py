"""Updates all parameters by the gradients of a step."""

import jax
import jax.numpy as jnp

from spmdtrain.train.items.items import unless_skipped
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.optimizers import OptimizerState


def update_parameters(
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
    of_host, host_state = {}, {}
    if setup.config.optimizer.memory == "host":
        from spmdtrain.train.updates.host_updates import streamed_updates

        of_host, host_state = streamed_updates(
            setup, gradients, state.opt_state, state.params, good
        )
    rules = {path: rule for path, rule in setup.update_rules.items() if path not in of_host}
    before = {path: state.opt_state[path] for path in rules}
    updates, opt_state = optimizers.updates(
        rules,
        setup.model.parameters,
        {path: padding.from_rest(path, gradients[path]) for path in rules},
        {path: padding.tree_from_rest(path, tree) for path, tree in before.items()},
        {path: padding.from_rest(path, x) for path, x in state.params.items()},
        rate,
    )
    updates = {path: padding.to_rest(path, x) for path, x in updates.items()} | of_host
    after = {path: padding.tree_to_rest(path, tree) for path, tree in opt_state.items()}
    if good is not None:
        after = unless_skipped(good, after, before)
    after |= host_state
    if setup.frozen:
        updates = _zero_frozen(setup, updates)
    return updates, {path: after[path] for path in setup.update_rules}


def _zero_frozen(setup: Setup, updates: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Zeroes the updates of frozen layers, and of weights that only embed tokens.

    They have no gradient, but weight decay and leftover momentum of an earlier stage would still
    move them.
    """
    below = setup.model.below_the_stack(setup.config)
    learns = jnp.asarray(setup.model.stage_layout.numbers >= setup.frozen)

    def above(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(learns, range(learns.ndim, x.ndim)), x, 0)

    cut = {path: above(x) if setup.model.in_stack(path) else x for path, x in updates.items()}
    return cut | {path: jnp.zeros_like(cut[path]) for path in below & cut.keys()}
