"""Makes the initial state of a run that starts from existing weights, e.g. published ones."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import jax

from spmdtrain.models.adapters.by_path import magnitude_paths, with_few_bits, with_magnitudes
from spmdtrain.train.fresh import fresh_without, with_initial_items
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard_on
from spmdtrain.train.state import TrainState
from spmdtrain.train.updates import optimizers


def with_weights(setup: Setup, weights: dict[str, jax.Array]) -> TrainState:
    """Returns the state of a new run that starts from these weights, with its items and moments.

    The other parameters start as in `init_state`; magnitudes of adapters (DoRA) start as the norms
    of these weights.
    """
    weights = _quantised(setup, weights)
    state = fresh_without(setup, weights)
    begun = state.params
    state = replace(state, params={path: (begun | weights)[path] for path in setup.state.params})
    state = replace(state, params=state.params | _magnitudes(setup, state.params, begun))
    if any(rule.gradient_point for rule in setup.update_rules.values()):
        state = replace(state, opt_state=_optimizer_state(setup, state.params))
    return with_initial_items(setup, state, setup.state.items)


def _optimizer_state(setup: Setup, params: dict[str, jax.Array]) -> optimizers.OptimizerState:
    """Returns the initial optimizer state for these parameters, sharded."""
    padding = setup.padding

    def begin(params: dict[str, jax.Array]) -> optimizers.OptimizerState:
        values = {path: padding.from_rest(path, x) for path, x in params.items()}
        fresh = optimizers.init(setup.update_rules, setup.model.parameters, values)
        return {path: padding.tree_to_rest(path, tree) for path, tree in fresh.items()}

    shardings = jax.tree.map(lambda x: x.sharding, setup.state.opt_state)
    return jax.jit(begin, out_shardings=shardings)(params)


def with_wide_base(setup: Setup) -> Setup:
    """Returns the setup with the original weights in place of a quantised base."""
    config = setup.config
    if config.finetune.base == "float":
        return setup
    finetune = config.finetune.model_copy(update={"base": "float"})
    return shard_on(config.model_copy(update={"finetune": finetune}), setup.mesh, setup.make)


def _quantised(setup: Setup, weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the weights, quantising those that this setup stores quantised."""
    wide = {path: x for path, x in weights.items() if path not in setup.state.params}
    kind = setup.config.finetune.base
    if not wide or kind == "float":
        return weights
    at_rest = {path: x for path, x in weights.items() if path not in wide}
    for path in list(wide):  # one at a time: each wide weight is freed once it has been quantised

        def made(x: jax.Array, path: str = path) -> dict[str, jax.Array]:
            return with_few_bits({path: x}, [path], kind, setup.model.parameters)

        abstract = jax.eval_shape(made, wide[path])
        shardings = {name: setup.state.params[name].sharding for name in abstract}
        at_rest |= jax.jit(made, out_shardings=shardings)(wide[path])
        del wide[path], weights[path]
    return at_rest


def _magnitudes(
    setup: Setup, params: Mapping[str, jax.Array], paths: Collection[str]
) -> dict[str, jax.Array]:
    """Computes the magnitudes at `paths` from the current weights; other paths are skipped."""
    of_adapters = [path for path in paths if path in magnitude_paths(params)]
    if not of_adapters:
        return {}

    def compute(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        values = {path: setup.padding.from_rest(path, x) for path, x in params.items()}
        values = with_magnitudes(values, setup.config.model)
        return {path: setup.padding.to_rest(path, values[path]) for path in of_adapters}

    shardings = {path: setup.state.params[path].sharding for path in of_adapters}
    return jax.jit(compute, out_shardings=shardings)(params)
