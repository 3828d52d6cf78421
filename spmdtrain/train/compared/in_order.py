"""Converts a training state to plain arrays, which do not depend on the mesh, and back into any
setup.

A plain array is whole, in the shape that the parameter has on one device: layers one after the
other, without the padding of the pipeline, of the vocabulary or of ZeRO-1. So the states of two
setups of the same model can be compared leaf by leaf, and a step of one can begin where a step of
the other did.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdtrain.train.all_parts import with_items
from spmdtrain.train.items.item import as_parameters
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

WEIGHT = "weight"
OPTIMIZER = "optimizer"
STEP = "step"


class Leaf(NamedTuple):
    """The name of a leaf of a state.

    `kind`: weight, optimizer, step or the name of an item. `path`: the dotted path of its
    parameter; empty if it belongs to none. `place`: within the optimizer state of the parameter, or
    within the item, as jax.tree_util.keystr writes it.
    """

    kind: str
    path: str = ""
    place: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.path, self.place)))


Plain = dict[Leaf, np.ndarray]


def plain_state(setup: Setup, state: TrainState) -> Plain:
    """Returns every leaf of a state of this setup as a plain array. Waits for the devices.

    An item sharded like the parameters becomes plain like them; any other is returned as stored.
    """
    state = jax.device_get(state)
    plain: Plain = {Leaf(STEP): np.asarray(state.step)}
    for kind, trees in _by_parameter(state).items():
        for path, tree in trees.items():
            for place, x in jax.tree_util.tree_leaves_with_path(tree):
                leaf = Leaf(kind, path, jax.tree_util.keystr(place))
                plain[leaf] = plain_array(setup, path, x)
    for kind, value in _others(state).items():
        for place, x in jax.tree_util.tree_leaves_with_path(value):
            plain[Leaf(kind, "", jax.tree_util.keystr(place))] = np.asarray(x)
    return plain


def placed_state(setup: Setup, plain: Mapping[Leaf, np.ndarray]) -> TrainState:
    """Returns the state of this setup whose plain arrays these are, on its devices.

    An array of an item that is neither whole nor sharded like the parameters must have the shape
    that this setup asks for. Raises KeyError if a leaf is missing.
    """
    abstract = setup.state

    def of_parameter(kind: str, path: str, tree: Any) -> Any:
        def leaf(place: Any, like: Any) -> jax.Array:
            x = plain[Leaf(kind, path, jax.tree_util.keystr(place))]
            return placed_array(setup, path, x, like)

        return jax.tree_util.tree_map_with_path(leaf, tree)

    def other(kind: str, value: Any) -> Any:
        def leaf(place: Any, like: Any) -> jax.Array:
            return jax.device_put(plain[Leaf(kind, "", jax.tree_util.keystr(place))], like.sharding)

        return jax.tree_util.tree_map_with_path(leaf, value)

    made = {
        kind: {path: of_parameter(kind, path, tree) for path, tree in trees.items()}
        for kind, trees in _by_parameter(abstract).items()
    }
    others = {kind: other(kind, value) for kind, value in _others(abstract).items()}
    named = {name: (made | others)[name] for name in abstract.items}
    step = jax.device_put(plain[Leaf(STEP)], abstract.step.sharding)
    return TrainState(step, made[WEIGHT], made[OPTIMIZER], named)


def plain_arrays(setup: Setup, arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns weights, gradients or updates by path as plain arrays. Waits for the devices."""
    on_host = jax.device_get(dict(arrays))
    return {path: plain_array(setup, path, x) for path, x in on_host.items()}


def placed_arrays(setup: Setup, plain: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns plain weights, by path, in the form that this setup has at rest."""
    rest = setup.state.params
    return {path: placed_array(setup, path, x, rest[path]) for path, x in plain.items()}


def plain_array(setup: Setup, path: str, x: Any) -> np.ndarray:
    """Returns the plain form of an array that belongs to the parameter at `path`.

    It is the parameter itself, or a leaf of its optimizer state, which may lack some of its dims.
    """
    x = np.asarray(x)
    padding, layout = setup.padding, setup.model.stage_layout
    if x.shape == padding.at_rest[path]:
        x = x[tuple(map(slice, padding.of_model[path]))]
    stacked = setup.model.in_stack(path) and x.shape[: len(layout.shape)] == layout.shape
    return layout.unstaged(x) if stacked else x


def placed_array(setup: Setup, path: str, x: np.ndarray, like: Any) -> jax.Array:
    """Returns the plain array `x` in the shape and sharding of `like`; inverts `plain_array`."""
    layout = setup.model.stage_layout
    if setup.model.in_stack(path) and x.shape[:1] == (layout.layers,):
        stack: Any = x
        x = np.asarray(layout.staged(stack))
    more = [(0, rests - has) for has, rests in zip(x.shape, like.shape, strict=True)]
    return jax.device_put(np.pad(x, more) if more else x, like.sharding)


def _by_parameter(state: TrainState) -> dict[str, Mapping[str, Any]]:
    """Returns the trees of a state that belong to parameters, by kind and path."""
    others = {
        item.name: value for item, value in with_items(state.items) if item.rests is as_parameters
    }
    return {WEIGHT: state.params, OPTIMIZER: state.opt_state} | others


def _others(state: TrainState) -> dict[str, Any]:
    return {
        item.name: value
        for item, value in with_items(state.items)
        if item.rests is not as_parameters
    }
