"""Stores the checkpoints of a run: RUN/checkpoints/N holds the state after N completed steps.

This is the only file that uses Orbax. A step has the items `params`, so that weights can be read
alone, `state` (of the optimizer), one for each further part of the state, such as `ema` (items.py),
and `meta` (meta.py). Orbax writes in the background under a temporary name and renames, so a step
that is listed is complete. Restoring reads straight into the shards of the abstract state, whatever
mesh or number of processes wrote them. Parameters are saved in the form they have at rest: stacked
layers in pipeline layout, padded if their mesh needed it. If another layout or padding is asked
for, they are read and laid out again, one parameter at a time.

Every leaf that is read is compared with its fingerprint in `meta` (fingerprint.py). If any process
finds damage, all processes raise DamagedError.
"""

import contextlib
import functools
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import DictKey
from orbax.checkpoint import type_handlers

from spmdtrain.checkpoints.hostile import (
    check_chunks,
    check_description,
    check_files,
    check_names,
    check_sizes,
)
from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint, fingerprint, fingerprints
from spmdtrain.checkpoints.leaves.items import (
    arrays_of,
    by_parameter,
    folded,
    from_note,
    is_in,
    notes_of,
    saved_by_parameter,
    shapes_saved,
)
from spmdtrain.checkpoints.leaves.relayout import (
    as_saved,
    cut_to,
    in_layout,
    lay_out_anew,
    without_padding,
)
from spmdtrain.checkpoints.meta import (
    FORMAT,
    PARTS,
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
from spmdtrain.checkpoints.plain_path import PlainPath
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config.errors import (
    CheckpointError,
    DamagedError,
    StorageError,
    UnfitError,
    UserError,
)
from spmdtrain.config.run_files import CHECKPOINTS
from spmdtrain.pipeline.layout import StageLayout
from spmdtrain.processes.processes import any_process, this_process
from spmdtrain.train.fresh import with_items_begun
from spmdtrain.train.items import ema, items
from spmdtrain.train.items.item import Item, Value, as_parameters
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

if TYPE_CHECKING:
    from etils import epath  # the paths that Orbax expects

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step that is being saved
# The file that marks a complete item: one for arrays, one for JSON.
WHOLE = ("manifest.ocdbt", "metadata")
WEIGHTS = ("params", ema.ITEM.name)  # the items that are read a layer at a time
LAYERS_AT_ONCE = 2**28  # bytes of an array whose layers are read together
QUARANTINE = "quarantine"  # the folder of damaged steps, next to the good ones
SETTLE_SECONDS = 1.0  # for pending writes to finish after a failure
MOST_SETTLE_SECONDS = 10.0  # if the disk never settles
STRAY = "Event loop is closed"  # error of a thread that outlives the one that failed
# Orbax logs several lines for every save, and a traceback per thread for a failure, which is also
# raised as one exception.
for _logger in ("absl", "asyncio"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


class Checkpoints:
    """The checkpoints of one run directory.

    `setup` is that of the saved and restored state; None if only `read_weights` is used. `keep`
    decides which are kept; None opens them read-only.
    """

    def __init__(self, run: Path, setup: Setup | None, keep: Retention | None):
        _hide_stray_errors()
        self._setup = setup
        self.retention = keep
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Preserved(keep) if keep else None,
            cleanup_tmp_directories=keep is not None,
            read_only=keep is None,
            multiprocessing_options=_processes(),
        )
        arrays = ["params", "state", *(item.name for item in items.TABLE if item.note is None)]
        handlers = {item: _array_handler() for item in arrays}
        handlers |= {"meta": ocp.JsonCheckpointHandler()}
        self._saving: list[int] = []
        self._without_arrays: set[str] = set()  # items without a manifest
        self._failed = False
        self._directory = (run / CHECKPOINTS).absolute()
        for step in steps_in(run):
            try:
                check_description(self._directory / str(step))
            except ValueError as error:
                raise DamagedError(
                    f"checkpoint {self._directory / str(step)} is damaged: {error}",
                    fix=f"mv {step} {step}.damaged, in {self._directory}",
                ) from None
        try:
            if keep is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
            self._plain = PlainPath(self._directory) if self._directory.is_dir() else None
            self._manager = ocp.CheckpointManager(
                self._plain.path if self._plain else self._directory,
                options=options,
                item_handlers=handlers,
            )
        except OSError as error:
            raise StorageError(f"cannot write {run}: {error.strerror}") from None

    def newest(self) -> int | None:
        """Returns the newest complete step, if there is one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: Meta) -> None:
        """Starts saving; `state` may be donated as soon as this returns.

        Waits for the previous save, if it is still under way. `completed` tells when this one is on
        disk.
        """
        trees = arrays_of(state)
        arrays = named_leaves(trees)
        leaves = describe(arrays)
        layout = self._asked_setup().model.layout
        of_model = describe(named_leaves(self._without_padding(by_parameter(state), layout)))
        meta = {
            "format": FORMAT,
            "leaves": leaves,
            "unpadded": {name: leaf[0] for name, leaf in of_model.items() if leaf != leaves[name]},
            "layout": layout.describe(),
            "fingerprints": fingerprints(arrays),
            **notes_of(state),
        } | meta
        if self.retention:
            meta |= self.retention.meta([*self.steps(), step])
        meta["digest"] = digest(meta)
        saved = ocp.args.Composite(
            # A state of weights alone, such as an import makes, has no optimizer item.
            **{
                item: ocp.args.PyTreeSave(tree, save_args=_save_args(item, tree, layout))
                for item, tree in trees.items()
                if tree
            },
            meta=ocp.args.JsonSave(meta),
        )
        self._guarded(lambda: self._manager.save(step, args=saved))
        self._saving.append(step)
        self._without_arrays = {item for item, tree in trees.items() if not jax.tree.leaves(tree)}

    def completed(self) -> list[int]:
        """Returns the steps whose saves have reached the disk since the last call."""
        if not self._saving:
            return []
        if self._manager.is_saving_in_progress():
            # It is the last one, which started when the earlier ones had ended.
            done = self._saving[:-1]
            self._saving = self._saving[-1:]
            return done
        self.wait()  # raises if a save failed
        done = self._saving
        self._saving = []
        self._check_readable(done[-1])  # earlier ones may be deleted already
        return done

    def _check_readable(self, step: int) -> None:
        """Raises StorageError if a save has ended but its files cannot be read back."""
        if jax.process_index() > 0:
            return
        folder = self._folder(step)
        saved = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
        missing = [
            path.name
            for path in saved
            if path.name not in self._without_arrays
            and not any((path / name).exists() for name in WHOLE)
        ]
        if missing or not saved:
            raise StorageError(
                f"{self._at(step)} was written but cannot be read back",
                found=f"{' and '.join(sorted(missing)) or 'nothing'} without a manifest",
                fix="another --run",
            )

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Meta]:
        """Returns the state saved at `step`, each leaf in the sharding that `abstract` gives it.

        Items of the state that were not saved start afresh from its weights: see `check_items`.
        """
        meta, _ = self._meta(step)
        found, meta = self._restored(step, saved_by_parameter(abstract, meta))
        counter = jax.make_array_from_callback(
            (), abstract.step.sharding, lambda _: abstract.step.dtype.type(step)
        )
        values = {}
        for item, asked in items.of(abstract.items):
            value = found.get(item.name)
            if item.note:
                value = from_note(item, asked, meta)
            elif item.rests is not as_parameters:
                value = self._read_unlike_parameters(step, item, asked)
            if value is not None:
                values[item.name] = value
        state = TrainState(counter, found["params"], found["state"], values)
        return with_items_begun(self._asked_setup(), state, abstract.items.keys() - values), meta

    def _read_unlike_parameters(self, step: int, item: Item, asked: Value) -> Value | None:
        """Returns an item not sharded like the parameters; None if it must start afresh."""
        meta, _ = self._meta(step)
        shapes = shapes_saved(item, asked, meta)
        if shapes is None:
            return None
        folder = self._folder(step) / item.name
        tree = self._read(step, lambda: _saved_tree(folder))
        self._check_trees(step, {item.name: tree}, meta)
        found = self._read(step, lambda: _read_leaves(folder, tree, shapes))
        self._verify(step, meta, fingerprints(named_leaves({item.name: found})))
        return folded(item, found, asked)

    def restore_params(
        self,
        step: int,
        params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
        *,
        ema: bool = False,
    ) -> tuple[dict[str, jax.Array], Meta]:
        """Returns only the weights; with `ema` the float32 averages of those that are trained."""
        if not ema:
            found, meta = self._restored(step, {"params": params})
            return found["params"], meta
        averaged = self.averaged(step)
        asked = {
            path: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding)
            for path, x in params.items()
            if path in averaged
        }
        averages, meta = self._restored(step, {"ema": asked})
        if asked.keys() == params.keys():
            return averages["ema"], meta
        found, meta = self._restored(step, {"params": params})
        return found["params"] | averages["ema"], meta

    def read_weights(self, step: int, *, ema: bool = False) -> dict[str, np.ndarray]:
        """Returns only the weights, as plain arrays with layers in order; needs neither model nor
        mesh.

        With `ema`, those that are trained are averages.
        """
        found = self._read_item(step, "params")
        if ema:
            self.averaged(step)  # raises if there is none
            found |= self._read_item(step, "ema")
        return found

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
        folder = self._folder(step) / item
        there = self._read(step, lambda: _read_plain(folder, only))
        names = {prefix(item) + path: path for path in there}
        found = {name: there[names[name]] for name in meta["leaves"] if name in names}
        self._verify(step, meta, {name: fingerprint(x) for name, x in found.items()})
        unpadded = unpadded_leaves(meta)
        found = {names[name]: cut_to(x, unpadded[name][0]) for name, x in found.items()}
        return {path: _in_order(path, x, saved) for path, x in found.items()}

    def arrays_of(self, step: int, item: str) -> tuple[Path, dict[str, Any]]:
        """Returns the folder of an item that is a flat dict, and descriptions of its arrays."""
        folder = self._folder(step) / item

        def read() -> dict[str, Any]:
            tree = _saved_tree(folder)
            check_sizes(_leaves_of(tree), Path(folder))
            return tree

        return Path(folder), self._read(step, read)

    def verify(self, step: int, found: Mapping[str, Fingerprint]) -> None:
        """Raises DamagedError if these fingerprints, by the meta's names, are not those saved."""
        self._verify(step, self._meta(step)[0], found)

    def check_items(self, step: int, abstract: TrainState) -> None:
        """Raises the error of an item of the state that was not saved, if it defines one."""
        meta, _ = self._meta(step)
        for item, _ in items.of(abstract.items):
            if item.lacking and not is_in(meta, item):
                raise item.lacking(self._at(step))

    def parameters(self, step: int) -> set[str]:
        """Returns the paths of the saved parameters."""
        meta, _ = self._meta(step)
        return set(of_items(meta["leaves"], ["params"]))

    def averaged(self, step: int) -> set[str]:
        """Returns the paths of the parameters with a saved average.

        Raises CheckpointError if there are none.
        """
        meta, _ = self._meta(step)
        if not is_in(meta, ema.ITEM):
            raise ema.none_saved(self._at(step))
        item = ema.ITEM.name
        return {name.removeprefix(prefix(item)) for name in of_items(meta["leaves"], [item])}

    def quarantine(self, steps: Collection[int]) -> None:
        """Moves damaged steps into `quarantine`, where nothing takes them for good ones.

        Deletes nothing. All processes must call it.
        """
        if jax.process_index() == 0:
            self._guarded(lambda: [_set_aside(self._folder(step)) for step in steps])
        if self.retention:
            self.retention.forget(steps)
        any_process(False)  # the others look at the directory only after the move
        self._manager.reload()

    def meta(self, step: int) -> Meta:
        """Returns the meta of a step, see meta.py. Raises DamagedError if it cannot be read."""
        return self._meta(step)[0]

    def steps(self) -> list[int]:
        """Returns all complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def recall(self, step: int) -> None:
        """Reads the losses stored in the checkpoint of `step`; none if it is damaged."""
        if self.retention:
            with contextlib.suppress(DamagedError):
                self.retention.recall(self._meta(step)[0])

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest evaluation loss, and the loss.

        None unless the best checkpoints are kept.
        """
        return self.retention.best(self.steps()) if self.retention else None

    def wait(self) -> None:
        """Waits until the last save is complete on disk."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        """Finishes the save in progress, however the run ends."""
        try:
            self._guarded(self._manager.close)
        finally:
            if self._failed:
                self._keep_removing()
            if self._plain:
                self._plain.close()

    def _restored(
        self, step: int, asked: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], Meta]:
        """Returns each item's leaves by parameter, and the meta.

        The leaves have the shapes and shardings of `asked`.
        """
        meta, saved = self._checked_meta(step, asked)
        folder = self._folder(step)
        trees = self._read(step, lambda: {item: _saved_tree(folder / item) for item in asked})
        self._check_trees(step, trees, meta)

        def read(item: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
            tree = {path: trees[item][path] for path in shapes}
            return self._read(step, lambda: _read_leaves(folder / item, tree, shapes))

        leaves = meta["leaves"]
        if saved == self._asked_setup().model.layout and describe(named_leaves(asked)) == of_items(
            leaves, asked
        ):
            found = {item: read(item, shapes) for item, shapes in asked.items()}
            self._verify(step, meta, fingerprints(named_leaves(found)))
            return found, meta

        def relaid(item: str, path: str) -> Any:
            tree = asked[item][path]

            def shape_of(leaf_path: tuple, leaf: Any) -> Any:
                shape, dtype = leaves[prefix(item) + leaf_name((DictKey(path), *leaf_path))]
                leaf = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
                return as_saved(self._asked_setup(), path, leaf, tuple(shape), saved)

            shapes = jax.tree_util.tree_map_with_path(shape_of, tree)
            found = read(item, {path: shapes})
            self._verify(step, meta, fingerprints(named_leaves({item: found})))
            return lay_out_anew(self._asked_setup(), path, found[path], tree, saved)

        return {item: {path: relaid(item, path) for path in asked[item]} for item in asked}, meta

    def _without_padding(
        self, trees: Mapping[str, Mapping[str, Any]], layout: StageLayout
    ) -> dict[str, Any]:
        """Returns shapes and dtypes of all leaves without padding, with the layers in `layout`."""

        def leaf(path: str, x: Any) -> jax.ShapeDtypeStruct:
            shape = without_padding(self._asked_setup(), path, x.shape)
            return jax.ShapeDtypeStruct(
                in_layout(self._asked_setup(), path, shape, layout), x.dtype
            )

        def tree(path: str, given: Any) -> Any:
            return jax.tree.map(lambda x: leaf(path, x), given)

        return {
            item: {path: tree(path, x) for path, x in of_item.items()}
            for item, of_item in trees.items()
        }

    def _checked_meta(
        self, step: int, asked: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Meta, StageLayout]:
        """Returns the checkpoint's meta and layout, after checking its leaves against `asked`.

        The two must match exactly: same names, same shapes without padding, and same dtypes, except
        that `precision.params` may have changed.
        """
        meta, layout_saved = self._meta(step)
        layout = self._asked_setup().model.layout
        if layout_saved.layers != layout.layers:
            raise UnfitError(
                f"{self._at(step)} does not fit",
                asked=f"model.layers={layout.layers}",
                found=f"{layout_saved.layers} layers",
                fix="the configuration that it was saved with, or another --run",
                meta=meta,
            )
        wanted = describe(named_leaves(self._without_padding(asked, layout_saved)))
        there = of_items(unpadded_leaves(meta), asked)
        different = [
            name
            for name in different_leaves(wanted, there)
            if not fits(wanted.get(name), there.get(name))
        ]
        if different:
            first = different[0]
            raise UnfitError(
                f"{self._at(step)} does not fit: {first}",
                asked=leaf_text(wanted.get(first)),
                found=f"{leaf_text(there.get(first))}{others_text(different)}",
                fix="the configuration that it was saved with, or another --run",
                meta=meta,
            )
        return meta, layout_saved

    def _check_trees(self, step: int, trees: Mapping[str, Any], meta: Meta) -> None:
        """Raises DamagedError if the files hold other leaves than the meta says."""
        there = describe(named_leaves(trees))
        said = of_items(meta["leaves"], trees)
        if different := different_leaves(said, there):
            first = different[0]
            raise self.damaged(
                step,
                f"{first} is {leaf_text(there.get(first))}, "
                f"saved was {leaf_text(said.get(first))}{others_text(different)}",
            )

    def _verify(self, step: int, meta: Meta, found: Mapping[str, Fingerprint]) -> None:
        """Raises DamagedError if a leaf that was read does not have its saved fingerprint."""
        saved = {name: tuple(meta["fingerprints"].get(name, ())) for name in found}
        if different := different_leaves(saved, found):
            raise self.damaged(
                step, f"{different[0]} is damaged: its fingerprint differs{others_text(different)}"
            )

    def _meta(self, step: int) -> tuple[Meta, StageLayout]:
        """Returns the meta of a step, and the layout in which its stacked layers were saved."""

        def read() -> tuple[Meta, StageLayout]:
            check_files(Path(self._folder(step)))
            found = ocp.JsonCheckpointHandler().restore(self._folder(step) / "meta")
            meta = cast(Meta, found)  # a JSON object, as json.loads returns it
            if meta["format"] != FORMAT:
                raise CheckpointError(
                    f"{self._at(step)} has format {meta['format']}",
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
        found = None
        wrong = None
        try:
            found = read()
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
        return found

    def damaged(self, step: int, what: str) -> DamagedError:
        """Returns the error of a step whose files are damaged."""
        before = [other for other in self.steps() if other < step]
        fix = (
            f"resuming the run, which continues from step {before[-1]}" if before else "another run"
        )
        return DamagedError(f"{self._at(step)} is damaged: {what}", fix=fix)

    def _guarded(self, action):
        """Runs an action that writes. tensorstore reports a full disk as a ValueError.

        Removes what the action leaves unfinished: on a full disk that space is needed.
        """
        try:
            return action()
        except (OSError, ValueError) as error:
            self._remove_unfinished()
            raise StorageError(
                f"cannot save a checkpoint: {' '.join(str(error).split())[:200]}"
            ) from error

    def _remove_unfinished(self) -> None:
        """Deletes the unfinished saves of this run."""
        self._saving = []
        self._failed = True
        if jax.process_index() == 0:
            for path in self._unfinished():
                shutil.rmtree(path, ignore_errors=True)

    def _keep_removing(self) -> None:
        """Deletes them until nothing comes back.

        tensorstore recreates folders for the writes that it has started, and those cannot be
        awaited.
        """
        quiet_since = time.monotonic()
        end = quiet_since + MOST_SETTLE_SECONDS
        while (now := time.monotonic()) < min(quiet_since + SETTLE_SECONDS, end):
            if self._unfinished():
                quiet_since = now
                self._remove_unfinished()
            time.sleep(SETTLE_SECONDS / 20)

    def _unfinished(self) -> list["epath.Path"]:
        return list(self._manager.directory.glob(f"*{UNFINISHED}*"))

    def _asked_setup(self) -> Setup:
        assert self._setup is not None, "only read_weights goes without a setup"
        return self._setup

    def _folder(self, step: int) -> "epath.Path":
        return self._manager.directory / str(step)

    def _at(self, step: int) -> str:
        return f"checkpoint {self._directory / str(step)}"


class _Preserved:
    """A `Retention` behind the interface that Orbax expects."""

    def __init__(self, retention: Retention):
        self._retention = retention

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        steps = [each.step for each in checkpoints]
        stay = self._retention.stay(steps)
        return [step in stay for step in steps]


@functools.cache
def _hide_stray_errors() -> None:
    """Hides tracebacks of other threads when a read or a write has failed.

    Other reads and writes are then still under way, and saves run in the background anyway. Each
    ends in a thread that finds its event loop closed and would print a traceback around our one
    line (orbax-checkpoint 0.12 on tensorstore 0.1.86).
    """
    unraisable_hook = sys.unraisablehook
    hook = sys.excepthook

    def quiet_unraisable(unraisable) -> None:
        if str(unraisable.exc_value) != STRAY:
            unraisable_hook(unraisable)

    def quiet(kind, error, trace) -> None:
        if str(error) != STRAY:
            hook(kind, error, trace)

    sys.unraisablehook = quiet_unraisable
    sys.excepthook = quiet


def newest_step(run: Path) -> int | None:
    """Returns the newest checkpoint below `run`; reads directory names only."""
    return max(steps_in(run), default=None)


def steps_in(run: Path) -> list[int]:
    """Returns the checkpoints below `run`, oldest first; reads directory names only."""
    folders = [path for path in (run / CHECKPOINTS).glob("*") if path.is_dir()]
    return sorted(int(path.name) for path in folders if path.name.isdecimal())


def _set_aside(folder: "epath.Path") -> None:
    quarantine = folder.parent / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    taken = len(list(quarantine.glob(f"{folder.name}*")))
    folder.rename(quarantine / (f"{folder.name}.{taken}" if taken else folder.name))


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler with which only the first replica writes an array.

    By default Orbax slices replicated arrays across replicas, on the devices and all at the same
    time: a run over `data` that just fits would run out of memory at its first save.
    """
    arrays = type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _processes() -> ocp.options.MultiprocessingOptions:
    """Returns which processes Orbax waits for: all, or this one in a block of `apart`."""
    if this_process()[1] == jax.process_count():
        return ocp.options.MultiprocessingOptions()
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="apart"
    )


def _save_args(item: str, tree: Any, layout: StageLayout) -> Any:
    """Returns how the arrays of an item are cut into chunks, which are always read whole.

    By default a chunk holds all layers of a device's part. For large weights it holds one layer, so
    that an export need not hold them all.
    """

    def of_leaf(x: jax.Array) -> ocp.SaveArgs:
        dims = len(layout.shape)
        is_large = item in WEIGHTS and x.nbytes > LAYERS_AT_ONCE and x.shape[:dims] == layout.shape
        return ocp.SaveArgs(shard_axes=tuple(range(dims)) if is_large else ())

    return jax.tree.map(of_leaf, tree)


def _read_plain(folder: "epath.Path", only: str | None = None) -> dict[str, np.ndarray]:
    """Returns every leaf of an item that is a flat dict, or just one, as whole numpy arrays."""
    tree = _saved_tree(folder)
    check_sizes(_leaves_of(tree), Path(folder))
    if only is not None:
        tree = {only: tree[only]}
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    asked = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=only is not None)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=asked)


def _in_order(path: str, x: np.ndarray, saved: StageLayout | None) -> np.ndarray:
    """Returns a parameter with its layers, if it has any, as [layers, ...]."""
    if (
        saved is None
        or not path.startswith("blocks.")
        or x.shape[: len(saved.shape)] != saved.shape
    ):
        return x
    return saved.unstaged(x)


def _shape_in_order(
    path: str, shape: tuple[int, ...], saved: StageLayout | None
) -> tuple[int, ...]:
    """Returns the shape of a parameter of this shape as `_in_order` gives it."""
    if saved is None or not path.startswith("blocks.") or shape[: len(saved.shape)] != saved.shape:
        return shape
    return (saved.layers, *shape[len(saved.shape) :])


def _saved_tree(folder: "epath.Path") -> Any:
    """Returns the structure of an item, with descriptions of its leaves."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.name} is missing")
    tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    leaves = _leaves_of(tree)
    check_names(leaves)
    check_chunks(leaves)
    return tree


def _leaves_of(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _read_leaves(folder: "epath.Path", saved: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    """Returns the leaves of `saved` in `folder`, with the structure and shardings of `asked`.

    Leaves are matched by name. The structures around them may differ: nodes without leaves, such as
    the state of a rule that keeps nothing, are ignored. The handler is called without a
    Checkpointer, in which a reading process would wait for one that has failed.
    """
    wanted = {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(asked)}
    item = jax.tree_util.tree_map_with_path(lambda path, _: wanted[leaf_name(path)], saved)
    how = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype),
        item,
    )
    found = ocp.PyTreeCheckpointHandler().restore(
        folder,
        args=ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True),
    )
    values = {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(found)}
    return jax.tree_util.tree_map_with_path(lambda path, _: values[leaf_name(path)], asked)
