"""How the items of a training state (train/items.py) lie in a checkpoint, and come back from it.

Arrays lie in a folder of their own, an item each; a few numbers lie in the meta, under the item's
name. Those that rest as parameters do are read and laid out anew as parameters are; the others come
back as they were saved, or are folded where the mesh wants another shape.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmdtrain.checkpoints.leaves.relayout import evenly
from spmdtrain.checkpoints.meta import Meta, describe, has_item, named_leaves, of_items
from spmdtrain.train import items
from spmdtrain.train.item import Item, Value, as_parameters
from spmdtrain.train.state import TrainState

WEIGHTS = "params"
OPTIMIZER_STATE = "state"


def arrays_of(state: TrainState) -> dict[str, dict[str, Any]]:
    """The trees of a state that a checkpoint holds as arrays, by item."""
    arrays = {item.name: value for item, value in items.of(state.items) if item.note is None}
    return {WEIGHTS: state.params, OPTIMIZER_STATE: state.opt_state} | arrays


def by_parameter(state: TrainState) -> dict[str, dict[str, Any]]:
    """Of these the trees whose leaves rest as parameters do, each by dotted path."""
    unlike = {item.name for item, _ in items.of(state.items) if item.rests is not as_parameters}
    return {item: tree for item, tree in arrays_of(state).items() if item not in unlike}


def saved_by_parameter(state: TrainState, meta: Meta) -> dict[str, dict[str, Any]]:
    """Of these again the trees that a checkpoint with this meta holds, or has to."""
    return {
        item: tree
        for item, tree in by_parameter(state).items()
        if item not in state.items or has_item(meta, item)
    }


def notes_of(state: TrainState) -> dict[str, Any]:
    """What the meta says of a state, by item."""
    return {item.name: item.note.write(value) for item, value in items.of(state.items) if item.note}


def is_in(meta: Meta, item: Item) -> bool:
    """True if a checkpoint with this meta holds the item."""
    return item.name in meta if item.note else has_item(meta, item.name)


def begins_anew(abstract: TrainState, meta: Meta) -> list[str]:
    """The items that the checkpoint holds, and that nothing brings to the shapes asked for."""
    return [
        item.name
        for item, asked in items.of(abstract.items)
        if not item.note
        and item.rests is not as_parameters
        and has_item(meta, item.name)
        and shapes_saved(item, asked, meta) is None
    ]


def from_note(item: Item, asked: Value, meta: Meta) -> Value | None:
    """The value of an item that lies in the meta, in its shards; None where the meta lacks it."""
    if item.note is None or item.name not in meta:
        return None

    def placed(like: jax.ShapeDtypeStruct, x: Any) -> jax.Array:
        whole = np.asarray(x, like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])

    return jax.tree.map(placed, asked, item.note.read(meta[item.name], asked))


def shapes_saved(item: Item, asked: Value, meta: Meta) -> Value | None:
    """The shapes in which an item's arrays were saved, split over the mesh much as they will rest.

    None where they are to begin anew: other names or dtypes, or other shapes and no `fold`.
    """
    wanted = named_leaves({item.name: asked})
    saved = of_items(meta["leaves"], [item.name])
    if describe(wanted) == saved:
        return asked
    dtypes = {name: str(x.dtype) for name, x in wanted.items()}
    if item.fold is None or {name: leaf[1] for name, leaf in saved.items()} != dtypes:
        return None
    shapes = iter(saved[name][0] for name in wanted)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = tuple(next(shapes))
        spec = evenly([*x.sharding.spec], shape, x.sharding.mesh.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(x.sharding.mesh, spec))

    return jax.tree.map(leaf, asked)


def folded(item: Item, found: Value, asked: Value) -> Value:
    """What was read in the shapes of `shapes_saved`, in those of `asked`."""
    fold = item.fold

    def one(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return x if fold is None or x.shape == like.shape else fold(x, like.shape)

    shardings = jax.tree.map(lambda x: x.sharding, asked)
    run = jax.jit(lambda tree: jax.tree.map(one, tree, asked), out_shardings=shardings)
    return run(found)
