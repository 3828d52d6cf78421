"""Reads the saved steps of a run and verifies them; needs neither a model nor a mesh.

Every leaf that is read is compared with its fingerprint in the meta (fingerprint.py). If any
process finds damage, all processes raise DamagedError.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from spmdtrain.checkpoints.files.hostile import check_files, check_names, check_sizes
from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint, fingerprint
from spmdtrain.checkpoints.leaves.relayout import cut_to
from spmdtrain.checkpoints.leaves.stored_items import is_in
from spmdtrain.checkpoints.meta import (
    FORMAT,
    PARTS,
    Meta,
    describe,
    different_leaves,
    digest,
    leaf_text,
    named_leaves,
    of_items,
    others_text,
    prefix,
    unpadded_leaves,
)
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.checkpoints.store import Store, leaves_of, read_json, read_plain, saved_tree
from spmdtrain.config.errors import CheckpointError, DamagedError, UserError
from spmdtrain.config.schema import IN_STACK
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.processes.processes import any_process
from spmdtrain.train.all_parts import items_named


class SavedSteps:
    """The saved steps of one run directory. `keep` decides which are kept; None: only reads.

    See `Store` for `by_layer`.
    """

    def __init__(self, run: Path, keep: Retention | None = None, *, by_layer: bool = False):
        self.retention = keep
        self._store = Store(run, keep, by_layer=by_layer)

    def newest(self) -> int | None:
        """Returns the newest complete step, if there is one."""
        return self._store.newest()

    def steps(self) -> list[int]:
        """Returns all complete steps, oldest first."""
        return self._store.steps()

    def close(self) -> None:
        """Finishes the save in progress, however the run ends."""
        self._store.close()

    def read_weights(self, step: int, *, ema: bool = False) -> dict[str, np.ndarray]:
        """Returns only the weights, as plain arrays with layers in order.

        With `ema`, trained weights are averages. Needs neither model nor mesh.
        """
        weights = self._read_item(step, "params")
        if ema:
            self.averaged(step)  # raises if there is none
            weights |= self._read_item(step, "ema")
        return weights

    def weight_shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results of `read_weight`, by path. Reads only the meta."""
        meta, saved = self._meta(step)
        names = of_items(meta["leaves"], ["params"])
        shapes = {name: tuple(unpadded_leaves(meta)[name][0]) for name in names}
        return {path: _shape_in_order(path, shape, saved) for path, shape in shapes.items()}

    def read_weight(self, step: int, path: str, *, ema: bool = False) -> np.ndarray:
        """Returns one parameter of `read_weights`; with `ema` its average, if it has one."""
        item = "ema" if ema and path in self.averaged(step) else "params"
        return self._read_item(step, item, path)[path]

    def _read_item(self, step: int, item: str, only: str | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of an item that is a flat dict, by path, in the order of the meta.

        With `only`, returns just that array.
        """
        meta, saved = self._meta(step)
        folder = self._store.folder(step) / item
        by_path = self._read(step, lambda: read_plain(folder, only))
        names = {prefix(item) + path: path for path in by_path}
        by_name = {name: by_path[names[name]] for name in meta["leaves"] if name in names}
        self._verify(step, meta, {name: fingerprint(x) for name, x in by_name.items()})
        unpadded = unpadded_leaves(meta)
        by_name = {names[name]: cut_to(x, unpadded[name][0]) for name, x in by_name.items()}
        return {path: _in_order(path, x, saved) for path, x in by_name.items()}

    def read_arrays(self, step: int) -> dict[str, np.ndarray]:
        """Returns every array of a step by its name in the meta, whole, in its saved layout.

        Needs neither model nor mesh.
        """
        meta, _ = self._meta(step)
        folder = self._store.folder(step)
        folders = [path.name for path in folder.iterdir() if path.is_dir() and path.name != "meta"]
        held = [item for item in folders if of_items(meta["leaves"], [item])]
        trees = self._read(step, lambda: {item: read_plain(folder / item) for item in held})
        arrays = named_leaves(trees)
        self._verify(step, meta, {name: fingerprint(x) for name, x in arrays.items()})
        return arrays

    def arrays_of(self, step: int, item: str) -> tuple[Path, dict[str, Any]]:
        """Returns the folder of an item that is a flat dict, and descriptions of its arrays."""
        folder = self._store.folder(step) / item

        def read() -> dict[str, Any]:
            tree = saved_tree(folder)
            check_sizes(leaves_of(tree), Path(folder))
            return tree

        return Path(folder), self._read(step, read)

    def verify(self, step: int, sums: Mapping[str, Fingerprint]) -> None:
        """Raises DamagedError if these fingerprints, by the meta's names, are not those saved."""
        self._verify(step, self._meta(step)[0], sums)

    def parameters(self, step: int) -> set[str]:
        """Returns the paths of the saved parameters."""
        meta, _ = self._meta(step)
        return set(of_items(meta["leaves"], ["params"]))

    def averaged(self, step: int) -> set[str]:
        """Returns the paths of the parameters with a saved average.

        Raises CheckpointError if there are none.
        """
        meta, _ = self._meta(step)
        (item,) = items_named(["ema"]).table
        if not is_in(meta, item):
            assert item.lacking is not None, "nothing stands in for an average"
            raise item.lacking(self._store.at(step))
        names = of_items(meta["leaves"], [item.name])
        return {name.removeprefix(prefix(item.name)) for name in names}

    def meta(self, step: int) -> Meta:
        """Returns the meta of a step, see meta.py. Raises DamagedError if it cannot be read."""
        return self._meta(step)[0]

    def _check_trees(self, step: int, trees: Mapping[str, Any], meta: Meta) -> None:
        """Raises DamagedError if the leaves in the files are not those that the meta lists."""
        on_disk = describe(named_leaves(trees))
        recorded = of_items(meta["leaves"], trees)
        if different := different_leaves(recorded, on_disk):
            first = different[0]
            raise self.damaged(
                step,
                f"{first} is {leaf_text(on_disk.get(first))}, "
                f"saved was {leaf_text(recorded.get(first))}{others_text(different)}",
            )

    def _verify(self, step: int, meta: Meta, sums: Mapping[str, Fingerprint]) -> None:
        """Raises DamagedError if a leaf that was read does not have its saved fingerprint."""
        saved = {name: tuple(meta["fingerprints"].get(name, ())) for name in sums}
        if different := different_leaves(saved, sums):
            raise self.damaged(
                step, f"{different[0]} is damaged: its fingerprint differs{others_text(different)}"
            )

    def _meta(self, step: int) -> tuple[Meta, StageLayout]:
        """Returns the meta of a step, and the layout in which its stacked layers were saved."""

        def read() -> tuple[Meta, StageLayout]:
            check_files(Path(self._store.folder(step)))
            document = read_json(self._store.folder(step) / "meta")
            meta = cast(Meta, document)  # a JSON object, as json.loads returns it
            if meta["format"] != FORMAT:
                raise CheckpointError(
                    f"{self._store.at(step)} has format {meta['format']}",
                    found=f"this version reads format {FORMAT}",
                )
            if meta.pop("digest") != digest(meta):
                raise ValueError("its meta is damaged: its digest differs")
            if missing := [part for part in PARTS if not isinstance(meta.get(part), dict)]:
                raise ValueError(f"its meta has no {missing[0]}")
            check_names(meta["leaves"])
            return meta, StageLayout(**meta["layout"])

        return self._read(step, read)

    def _read(self, step: int, read: Callable[[], Any]) -> Any:
        """Calls `read` in every process. Raises DamagedError in all of them if one fails."""
        result = None
        wrong = None
        try:
            result = read()
        except (UserError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises nothing narrower for a damaged data file
            wrong = error
        if wrong is not None:
            any_process(True)
            cause = " ".join(str(wrong.__cause__ or wrong).split())[:200].rstrip(".")
            raise self.damaged(step, f"it cannot be read: {cause}") from wrong
        if any_process(False):
            raise self.damaged(step, "another process cannot read it")
        return result

    def damaged(self, step: int, what: str) -> DamagedError:
        """Returns the error of a step whose files are damaged."""
        before = [other for other in self._store.steps() if other < step]
        fix = (
            f"resuming the run, which continues from step {before[-1]}" if before else "another run"
        )
        return DamagedError(f"{self._store.at(step)} is damaged: {what}", fix=fix)


def _in_order(path: str, x: np.ndarray, saved: StageLayout | None) -> np.ndarray:
    """Returns a parameter with its layers, if it has any, as [layers, ...]."""
    if saved is None or not path.startswith(IN_STACK) or x.shape[: len(saved.shape)] != saved.shape:
        return x
    return saved.unstaged(x)


def _shape_in_order(
    path: str, shape: tuple[int, ...], saved: StageLayout | None
) -> tuple[int, ...]:
    """Returns the shape of a parameter of this shape as `_in_order` gives it."""
    if saved is None or not path.startswith(IN_STACK) or shape[: len(saved.shape)] != saved.shape:
        return shape
    return (saved.layers, *shape[len(saved.shape) :])
