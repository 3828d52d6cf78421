"""Saves and restores a run: RUN/checkpoints/N holds the state after N completed steps.

A step has the items `params`, so that weights can be read alone, `state` (of the optimizer), one
for each further part of the state, such as `ema` (leaves/stored_items.py), and `meta` (meta.py).
Restoring reads straight into the shards of the abstract state, whatever mesh or number of processes
wrote them. Parameters are saved as they are laid out between steps: stacked layers in pipeline
layout, padded if their mesh needed it. For another layout or padding they are read and laid out
again, one parameter at a time.
"""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey

from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint, fingerprints
from spmdtrain.checkpoints.leaves.relayout import (
    as_saved,
    in_layout,
    lay_out_again,
    without_padding,
)
from spmdtrain.checkpoints.leaves.stored_items import (
    arrays_of,
    by_parameter,
    folded,
    from_note,
    is_in,
    notes_of,
    saved_by_parameter,
    shapes_saved,
)
from spmdtrain.checkpoints.meta import (
    FORMAT,
    Meta,
    describe,
    different_leaves,
    digest,
    fits,
    leaf_name,
    leaf_text,
    named_leaves,
    of_items,
    others_text,
    prefix,
    unpadded_leaves,
)
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.checkpoints.store import read_leaves, saved_tree
from spmdtrain.config.errors import DamagedError, UnfitError
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.train.all_parts import items_named, with_items
from spmdtrain.train.fresh import with_initial_items
from spmdtrain.train.items.item import Item, Value, as_parameters
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


class Checkpoints(SavedSteps):
    """The checkpoints of one run directory, which hold states of `setup`.

    `keep` decides which are kept; None opens them read-only. See `Store` for `by_layer`.
    """

    def __init__(self, run: Path, setup: Setup, keep: Retention | None, *, by_layer: bool = False):
        super().__init__(run, keep, by_layer=by_layer)
        self._setup = setup
        self._by_layer = by_layer

    def save(self, step: int, state: TrainState, meta: Meta) -> None:
        """Starts saving; `state` may be donated as soon as this returns.

        Waits for the previous save, if it is still under way. `completed` lists the step once it is
        on disk.
        """
        layout = self._setup.model.stage_layout
        self._store.save(step, arrays_of(state), self.whole_meta(step, state, meta), layout)

    def whole_meta(self, step: int, state: TrainState, meta: Meta) -> Meta:
        """Returns the whole meta of a checkpoint: `meta`, and the description of its arrays.

        Waits for the devices. All processes must call it, and all get the same fingerprints.
        """
        arrays = named_leaves(arrays_of(state))
        leaves = describe(arrays)
        layout = self._setup.model.stage_layout
        of_model = describe(named_leaves(self._without_padding(by_parameter(state), layout)))
        meta = {
            "format": FORMAT,
            "leaves": leaves,
            "unpadded": {name: leaf[0] for name, leaf in of_model.items() if leaf != leaves[name]},
            "layout": layout.describe(),
            "fingerprints": self._fingerprints(arrays),
            **notes_of(state),
        } | meta
        if self.retention:
            meta |= self.retention.meta([*self._store.steps(), step])
        return meta | {"digest": digest(meta)}

    def _fingerprints(self, arrays: Mapping[str, jax.Array]) -> dict[str, Fingerprint]:
        """Returns the fingerprints of arrays; one array at a time if memory is short."""
        if not self._by_layer:
            return fingerprints(arrays)
        return {name: fingerprints({name: x})[name] for name, x in arrays.items()}

    def completed(self) -> list[int]:
        """Returns the steps whose saves have reached the disk since the last call."""
        return self._store.completed()

    def wait(self) -> None:
        """Waits until the last save is complete on disk."""
        self._store.wait()

    def quarantine(self, steps: Collection[int]) -> None:
        """Moves damaged steps into `quarantine`, so that nothing mistakes them for good ones.

        Deletes nothing. All processes must call it.
        """
        if self.retention:
            self.retention.forget(steps)
        self._store.quarantine(steps)

    def recall(self, step: int) -> None:
        """Reads the losses stored in the checkpoint of `step`; none if it is damaged."""
        if self.retention:
            with contextlib.suppress(DamagedError):
                self.retention.recall(self._meta(step)[0])

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest evaluation loss, and the loss.

        None unless the best checkpoints are kept.
        """
        return self.retention.best(self._store.steps()) if self.retention else None

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Meta]:
        """Returns the state saved at `step`, each leaf in its sharding in `abstract`.

        Items of the state that were not saved start afresh from its weights: see `check_items`.
        """
        meta, _ = self._meta(step)
        trees, meta = self._restored(step, saved_by_parameter(abstract, meta))
        values = {}
        for item, abstract_value in with_items(items_named(abstract.items).saved(abstract.items)):
            value = trees.get(item.name)
            if item.note:
                value = from_note(item, abstract_value, meta)
            elif item.rests is not as_parameters:
                value = self._read_unlike_parameters(step, item, abstract_value)
            if value is not None:
                values[item.name] = value
        state = TrainState(step_counter(step, abstract), trees["params"], trees["state"], values)
        return with_initial_items(self._setup, state, abstract.items.keys() - values), meta

    def _read_unlike_parameters(self, step: int, item: Item, abstract: Value) -> Value | None:
        """Returns an item not sharded like the parameters; None if it must start afresh."""
        meta, layout = self._meta(step)
        shapes = shapes_saved(item, abstract, meta)
        if shapes is None:
            return None
        folder = self._store.folder(step) / item.name
        tree = self._read(step, lambda: saved_tree(folder))
        self._check_trees(step, {item.name: tree}, meta)
        value = self._read(step, lambda: read_leaves(folder, tree, shapes))
        self._verify(step, meta, fingerprints(named_leaves({item.name: value})))
        return folded(self._setup, item, value, abstract, layout)

    def restore_params(
        self,
        step: int,
        params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
        *,
        ema: bool = False,
    ) -> tuple[dict[str, jax.Array], Meta]:
        """Returns only the weights; with `ema` the float32 averages of the trained ones."""
        if not ema:
            weights, meta = self._restored(step, {"params": params})
            return weights["params"], meta
        averaged = self.averaged(step)
        abstract = {
            path: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding)
            for path, x in params.items()
            if path in averaged
        }
        averages, meta = self._restored(step, {"ema": abstract})
        if abstract.keys() == params.keys():
            return averages["ema"], meta
        weights, meta = self._restored(step, {"params": params})
        return weights["params"] | averages["ema"], meta

    def check_items(self, step: int, abstract: TrainState) -> None:
        """Raises the error of an item of the state that was not saved, if it defines one."""
        meta, _ = self._meta(step)
        for item, _ in with_items(abstract.items):
            if item.lacking and not is_in(meta, item):
                raise item.lacking(self._store.at(step))

    def _restored(
        self, step: int, abstract: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], Meta]:
        """Returns each item's leaves by parameter, and the meta.

        The leaves have the shapes and shardings of `abstract`.
        """
        meta, saved = self._checked_meta(step, abstract)
        folder = self._store.folder(step)
        trees = self._read(step, lambda: {item: saved_tree(folder / item) for item in abstract})
        self._check_trees(step, trees, meta)

        def read(item: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
            tree = {path: trees[item][path] for path in shapes}
            return self._read(step, lambda: read_leaves(folder / item, tree, shapes))

        leaves = meta["leaves"]
        if saved == self._setup.model.stage_layout and describe(named_leaves(abstract)) == of_items(
            leaves, abstract
        ):
            values = {item: read(item, shapes) for item, shapes in abstract.items()}
            self._verify(step, meta, fingerprints(named_leaves(values)))
            return values, meta

        def relaid(item: str, path: str) -> Any:
            tree = abstract[item][path]

            def shape_of(leaf_path: tuple, leaf: Any) -> Any:
                shape, dtype = leaves[prefix(item) + leaf_name((DictKey(path), *leaf_path))]
                leaf = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
                return as_saved(self._setup, path, leaf, tuple(shape), saved)

            shapes = jax.tree_util.tree_map_with_path(shape_of, tree)
            value = read(item, {path: shapes})
            self._verify(step, meta, fingerprints(named_leaves({item: value})))
            return lay_out_again(self._setup, path, value[path], tree, saved)

        return {
            item: {path: relaid(item, path) for path in abstract[item]} for item in abstract
        }, meta

    def _without_padding(
        self, trees: Mapping[str, Mapping[str, Any]], layout: StageLayout
    ) -> dict[str, Any]:
        """Returns shapes and dtypes of all leaves without padding, with the layers in `layout`."""

        def leaf(path: str, x: Any) -> jax.ShapeDtypeStruct:
            shape = without_padding(self._setup, path, x.shape)
            return jax.ShapeDtypeStruct(in_layout(self._setup, path, shape, layout), x.dtype)

        def tree(path: str, of_parameter: Any) -> Any:
            return jax.tree.map(lambda x: leaf(path, x), of_parameter)

        return {
            item: {path: tree(path, x) for path, x in of_item.items()}
            for item, of_item in trees.items()
        }

    def _checked_meta(
        self, step: int, abstract: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Meta, StageLayout]:
        """Returns the checkpoint's meta and layout, after checking its leaves against `abstract`.

        The two must match exactly: same names, same shapes without padding, and same dtypes, except
        that `precision.params` may have changed.
        """
        meta, layout_saved = self._meta(step)
        layout = self._setup.model.stage_layout
        if layout_saved.layers != layout.layers:
            raise UnfitError(
                f"{self._store.at(step)} does not fit",
                asked=f"model.layers={layout.layers}",
                found=f"{layout_saved.layers} layers",
                fix="the configuration that it was saved with, or another --run",
                meta=meta,
            )
        wanted = describe(named_leaves(self._without_padding(abstract, layout_saved)))
        on_disk = of_items(unpadded_leaves(meta), abstract)
        different = [
            name
            for name in different_leaves(wanted, on_disk)
            if not fits(wanted.get(name), on_disk.get(name))
        ]
        if different:
            first = different[0]
            raise UnfitError(
                f"{self._store.at(step)} does not fit: {first}",
                asked=leaf_text(wanted.get(first)),
                found=f"{leaf_text(on_disk.get(first))}{others_text(different)}",
                fix="the configuration that it was saved with, or another --run",
                meta=meta,
            )
        return meta, layout_saved


def step_counter(step: int, abstract: TrainState) -> jax.Array:
    """Returns the number of completed steps as a state holds it, on the devices of `abstract`."""
    number = abstract.step.dtype.type(step)
    return jax.make_array_from_callback((), abstract.step.sharding, lambda _: number)
