"""Makes fresh values of the training state: the state at step 0, or some items of a later one."""

from collections.abc import Collection
from dataclasses import replace

import jax

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.context import random_key
from spmdtrain.processes.xla_flags import options_of_one_run
from spmdtrain.train.items.item import Start
from spmdtrain.train.items.items import Values
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState, fresh_state
from spmdtrain.train.updates import optimizers


def init_state(setup: Setup) -> TrainState:
    """Returns a fresh state at step 0, each leaf born in its shards, whatever `train.init_from`
    says: first_state.py reads that. Values depend only on the seed.

    Raises ConfigError if `train.epochs` has not been converted to steps, which the learning rate
    needs.
    """
    check_setup(setup)
    return fresh_without(setup, ())


def fresh_without(setup: Setup, paths: Collection[str]) -> TrainState:
    """Returns `init_state` without the parameters at these paths, which are never allocated."""
    epochs = setup.config.train.epochs
    if epochs is not None:
        raise ConfigError(
            f"train.epochs={epochs:g} has not been counted in steps yet",
            fix="config, data = open_data(config), and then shard(config)",
        )

    def lacking(state: TrainState) -> TrainState:
        params = {path: x for path, x in state.params.items() if path not in paths}
        return replace(state, params=params, items=setup.items.saved(state.items))

    def fresh(key: jax.Array, yes: jax.Array) -> TrainState:
        whole = fresh_state(
            setup.model,
            setup.update_rules,
            setup.config,
            key,
            setup.mesh,
            setup.specs,
            setup.padding,
            setup.items,
            yes,
        )
        return lacking(whole)

    shardings = jax.tree.map(lambda x: x.sharding, lacking(setup.state))
    key = random_key(setup.config.train.seed, "init")
    options = options_of_one_run(setup.platform)
    made = jax.jit(fresh, out_shardings=shardings, compiler_options=options)(key, True)
    return _with_unsaved_items(setup, made)


def with_initial_items(setup: Setup, state: TrainState, names: Collection[str]) -> TrainState:
    """Returns the state with initial values of these items, computed from its weights."""
    state = _with_unsaved_items(setup, state)
    saved = setup.items.saved(setup.state.items)
    abstract = {name: saved[name] for name in names if name in saved}
    if not abstract:
        return state
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def begin(params: dict[str, jax.Array]) -> Values:
        learned = optimizers.learned(setup.update_rules)
        sizes = setup.mesh.shape
        subjects = setup.items.subjects(setup.config, setup.model, sizes)
        start = Start(setup.config, params, learned, setup.specs, sizes, subjects)
        begun = setup.items.begin(start)
        return {name: begun[name] for name in abstract}

    begun = jax.jit(begin, out_shardings=shardings)(state.params)
    return replace(state, items=state.items | begun)


def _with_unsaved_items(setup: Setup, state: TrainState) -> TrainState:
    """Returns the state with all items that are never saved, reading those it lacks."""
    lacking = setup.state.items.keys() - setup.items.saved(setup.state.items) - state.items.keys()
    values = {name: setup.own[name].read() for name in sorted(lacking)}
    return replace(state, items=state.items | values) if values else state
