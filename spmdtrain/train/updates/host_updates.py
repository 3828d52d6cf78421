"""Updates parameters whose moments rest on the host, one layer at a time.

The moments of one layer come to the device, are updated there and go back before those of the next,
so the device never holds those of all layers. The rules are element by element (`by_element` in
config/schema/optimizer.py): each device updates its own part of a layer, and nothing is sent.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled.step_parts import part
from spmdtrain.models.abstract import over_stack
from spmdtrain.parallel.host import on_device, on_host, rests_on_host
from spmdtrain.parallel.regions import manual_region
from spmdtrain.train.setup import Setup
from spmdtrain.train.updates.optimizers import in_float32

Layers = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def streamed_paths(setup: Setup) -> list[str]:
    """Returns the parameters some of whose optimizer state rests on the host."""
    trees = setup.state.opt_state.items()
    return [path for path, tree in trees if any(map(rests_on_host, jax.tree.leaves(tree)))]


@part("optimizer")
def streamed_updates(
    setup: Setup,
    gradients: Mapping[str, jax.Array],
    state: Mapping[str, Any],
    values: Mapping[str, jax.Array],
    good: jax.Array | None,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Returns (updates, new state) of the `streamed_paths`, both as they rest.

    All arguments are as they rest. If `good` is false, the state is the old one.
    """
    updates, after = {}, {}
    for path in streamed_paths(setup):
        kinds = jax.tree.map(rests_on_host, setup.state.opt_state[path])
        specs = jax.tree.map(lambda x: x.sharding.spec, setup.state.opt_state[path])
        spec = setup.specs[path]
        run = manual_region(
            partial(_update, setup, path, kinds),
            setup.mesh,
            setup.mesh.axis_names,
            (spec, specs, spec, P()),
            (spec, specs),
        )
        unpadded = (_without_padding(setup, path, tree[path]) for tree in (gradients, values))
        gradient, value = unpadded
        updates[path], after[path] = run(gradient, state[path], value, good)
    return updates, after


def _without_padding(setup: Setup, path: str, x: jax.Array) -> jax.Array:
    """Returns x with zeros in its padding, whose moments then stay zero."""
    return setup.padding.to_rest(path, setup.padding.from_rest(path, x))


def _update(  # noqa: PLR0913 - what an update hangs on
    setup: Setup,
    path: str,
    kinds: Any,
    gradient: jax.Array,
    state: Any,
    value: jax.Array,
    good: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Returns (update, new state) of a device's part of a parameter."""
    parameter = setup.model.parameters[path]
    rule = setup.update_rules[path]
    of_layer = over_stack(rule.transformation.update, parameter.apart - parameter.stacked)

    def at_rest(is_on_host: bool, new: jax.Array, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new, old.dtype)
        if good is not None:
            new = jnp.where(good, new, old)
        return on_host(new) if is_on_host else new

    def update(gradient: jax.Array, state: Any, value: jax.Array) -> tuple[jax.Array, Any]:
        here = jax.tree.map(on_device, state)
        layer_update, after = of_layer(*in_float32((gradient, here, value)))
        return layer_update, jax.tree.map(at_rest, kinds, after, here)

    return _by_layer(update, parameter.stacked)(gradient, state, value)


def _by_layer(update: Layers, dims: int) -> Layers:
    """Returns `update` of one layer, for all layers of a stack with so many dims, in turn."""
    if not dims:
        return update

    def run(gradient: jax.Array, state: Any, value: jax.Array) -> tuple[jax.Array, Any]:
        def one(_: None, layer: tuple) -> tuple[None, tuple[jax.Array, Any]]:
            return None, _by_layer(update, dims - 1)(*layer)

        return jax.lax.scan(one, None, (gradient, state, value))[1]

    return run
