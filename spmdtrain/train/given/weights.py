"""The state of a new run that starts from given weights."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import jax

from spmdtrain.models.adapters.by_path import magnitude_paths, with_magnitudes
from spmdtrain.train.setup import Setup, fresh_but_for, with_items_begun
from spmdtrain.train.state import TrainState
from spmdtrain.train.updates import optimizers


def with_weights(setup: Setup, given: dict[str, jax.Array]) -> TrainState:
    """Returns the state of a new run that starts from these weights, with its items and moments.

    Parameters that are not given start as in `init_state`; magnitudes of adapters (DoRA) start with
    the norms of the given weights.
    """
    state = fresh_but_for(setup, given)
    begun = state.params
    state = replace(state, params={path: (begun | given)[path] for path in setup.state.params})
    state = replace(state, params=state.params | _magnitudes(setup, state.params, begun))
    params = state.params
    if any(rule.gradient_point for rule in setup.update_rules.values()):
        padding = setup.padding

        def begin(params: dict[str, jax.Array]) -> optimizers.OptimizerState:
            values = {path: padding.from_rest(path, x) for path, x in params.items()}
            fresh = optimizers.init(setup.update_rules, setup.model.parameters, values)
            return {path: padding.tree_to_rest(path, tree) for path, tree in fresh.items()}

        shardings = jax.tree.map(lambda x: x.sharding, setup.state.opt_state)
        state = replace(state, opt_state=jax.jit(begin, out_shardings=shardings)(params))
    return with_items_begun(setup, state, setup.state.items)


def _magnitudes(
    setup: Setup, params: Mapping[str, jax.Array], paths: Collection[str]
) -> dict[str, jax.Array]:
    """Returns the magnitudes of adapters at `paths`, from the current weights."""
    asked = [path for path in paths if path in magnitude_paths(params)]
    if not asked:
        return {}

    def found(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        values = {path: setup.padding.from_rest(path, x) for path, x in params.items()}
        values = with_magnitudes(values)
        return {path: setup.padding.to_rest(path, values[path]) for path in asked}

    shardings = {path: setup.state.params[path].sharding for path in asked}
    return jax.jit(found, out_shardings=shardings)(params)
