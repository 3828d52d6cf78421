"""Stores items of a training state (train/items/items.py) in a checkpoint, and reads them back.

Each item of arrays has its own folder; an item of a few numbers is in the meta, under its name.
Items sharded like the parameters are read and laid out again like the parameters. The others come
back as they were saved, or are folded if the mesh needs another shape.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmdtrain.checkpoints.leaves.relayout import evenly, in_shape
from spmdtrain.checkpoints.meta import Meta, describe, has_item, named_leaves, of_items
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.train.all_parts import items_named, with_items
from spmdtrain.train.items.item import Item, Value, as_parameters, per_data_shard
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

WEIGHTS = "params"
OPTIMIZER_STATE = "state"


def arrays_of(state: TrainState) -> dict[str, dict[str, Any]]:
    """Returns the trees of a state that a checkpoint stores as arrays, by item."""
    arrays = {
        item.name: value
        for item, value in with_items(items_named(state.items).saved(state.items))
        if item.note is None
    }
    return {WEIGHTS: state.params, OPTIMIZER_STATE: state.opt_state} | arrays


def by_parameter(state: TrainState) -> dict[str, dict[str, Any]]:
    """Returns the items of `arrays_of` whose leaves are sharded like the parameters, by dotted
    path.
    """
    unlike = {item.name for item, _ in with_items(state.items) if item.rests is not as_parameters}
    return {item: tree for item, tree in arrays_of(state).items() if item not in unlike}


def saved_by_parameter(state: TrainState, meta: Meta) -> dict[str, dict[str, Any]]:
    """Returns the items of `by_parameter` that a checkpoint with this meta holds, or must hold."""
    return {
        item: tree
        for item, tree in by_parameter(state).items()
        if item not in state.items or has_item(meta, item)
    }


def notes_of(state: TrainState) -> dict[str, Any]:
    """Returns the notes on a state that go into the meta, by item."""
    return {
        item.name: item.note.write(value) for item, value in with_items(state.items) if item.note
    }


def is_in(meta: Meta, item: Item) -> bool:
    """Returns True if a checkpoint with this meta holds the item."""
    return item.name in meta if item.note else has_item(meta, item.name)


def starting_afresh(abstract: TrainState, meta: Meta) -> list[str]:
    """Returns the saved items that must start afresh: nothing converts them to `abstract`."""
    return [
        item.name
        for item, value in with_items(abstract.items)
        if item.is_saved
        and not item.note
        and item.rests is not as_parameters
        and has_item(meta, item.name)
        and shapes_saved(item, value, meta) is None
    ]


def from_note(item: Item, abstract: Value, meta: Meta) -> Value | None:
    """Returns the value of an item stored in the meta, sharded; None if the meta lacks it."""
    if item.note is None or item.name not in meta:
        return None

    def placed(like: jax.ShapeDtypeStruct, x: Any) -> jax.Array:
        whole = np.asarray(x, like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])

    return jax.tree.map(placed, abstract, item.note.read(meta[item.name], abstract))


def shapes_saved(item: Item, abstract: Value, meta: Meta) -> Value | None:
    """Returns the shapes in which an item's arrays were saved, sharded much like the final ones.

    None if the item must start afresh: its names or dtypes differ, or its shapes do and it has no
    `fold`.
    """
    wanted = named_leaves({item.name: abstract})
    saved = of_items(meta["leaves"], [item.name])
    if describe(wanted) == saved:
        return abstract
    dtypes = {name: str(x.dtype) for name, x in wanted.items()}
    if item.fold is None or {name: leaf[1] for name, leaf in saved.items()} != dtypes:
        return None
    shapes = iter(saved[name][0] for name in wanted)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = tuple(next(shapes))
        # A stack in another layout has other dims; the first one counts data shards in each.
        spec = [*x.sharding.spec] if len(shape) == x.ndim else [*x.sharding.spec][:1]
        spec = evenly(spec, shape, x.sharding.mesh.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(x.sharding.mesh, spec))

    return jax.tree.map(leaf, abstract)


def folded(setup: Setup, item: Item, read: Value, abstract: Value, layout: StageLayout) -> Value:
    """Returns arrays read in the shapes of `shapes_saved`, folded to the shapes of `abstract`.

    If each data shard holds an array of a parameter's shape, it is also laid out again like the
    parameter. `layout` is that of the stack when it was saved.
    """
    fold = item.fold
    if fold is None:
        return read

    def one(path: tuple, x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if x.shape == like.shape:
            return x
        name = getattr(path[0], "key", "")
        if item.rests is not per_data_shard or name not in setup.model.parameters:
            return fold(x, like.shape)
        x = fold(x, (like.shape[0], *x.shape[1:]))
        return jax.vmap(lambda part: in_shape(setup, name, part, like.shape[1:], layout))(x)

    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    convert = partial(jax.tree_util.tree_map_with_path, one)
    run = jax.jit(lambda tree: convert(tree, abstract), out_shardings=shardings)
    return run(read)
