"""Wraps Orbax: this is the only file that uses it.

Orbax writes in the background under a temporary name and renames, so a step that is listed is
complete. Each item, of arrays or of JSON, has a separate folder. The meaning of the items, and
whether they are intact, is the business of checkpoints.py.
"""

import dataclasses
import functools
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from spmdtrain.checkpoints.files.hostile import (
    check_chunks,
    check_description,
    check_names,
    check_sizes,
)
from spmdtrain.checkpoints.files.plain_path import PlainPath
from spmdtrain.checkpoints.files.quarantine import set_aside
from spmdtrain.checkpoints.meta import Meta, leaf_name
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config.errors import DamagedError, StorageError
from spmdtrain.config.run_files import CHECKPOINTS, steps_in
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.processes.processes import any_process, this_process
from spmdtrain.train.all_parts import item_names

if TYPE_CHECKING:
    from etils import epath  # the paths that Orbax expects

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a step that is being saved
# The file that marks a complete item: one for arrays, one for JSON.
WHOLE = ("manifest.ocdbt", "metadata")
WEIGHTS = ("params", "ema")  # the items that are read a layer at a time
LAYERS_AT_ONCE = 2**28  # bytes of an array whose layers are read together
SETTLE_SECONDS = 1.0  # for pending writes to finish after a failure
MOST_SETTLE_SECONDS = 10.0  # if the disk never settles
STRAY = "Event loop is closed"  # error of a thread that outlives the one that failed
# Orbax logs several lines for every save, and a traceback per thread for a failure, which is also
# raised as one exception.
for _logger in ("absl", "asyncio"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


class Store:
    """The steps of one run directory. `keep` decides which are kept; None opens them read-only.

    A save copies the arrays to the host, so that training continues. A save `by_layer` never holds
    more than a few layers there, but the arrays must stay until it has ended; it is not compressed.
    """

    def __init__(self, run: Path, keep: Retention | None, *, by_layer: bool = False):
        _hide_stray_errors()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Preserved(keep) if keep else None,
            cleanup_tmp_directories=keep is not None,
            read_only=keep is None,
            multiprocessing_options=_processes(),
        )
        arrays = [
            "params",
            "state",
            *item_names(),
        ]
        handlers = {item: (_ByLayer() if by_layer else _array_handler()) for item in arrays}
        handlers |= {"meta": ocp.JsonCheckpointHandler()}
        self._arguments = _SaveByLayer if by_layer else ocp.args.PyTreeSave
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

    def steps(self) -> list[int]:
        """Returns all complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def folder(self, step: int) -> "epath.Path":
        """Returns the folder of a step, under a name that any library reads literally."""
        return self._manager.directory / str(step)

    def at(self, step: int) -> str:
        """Returns the name of a checkpoint in error messages."""
        return f"checkpoint {self._directory / str(step)}"

    def save(self, step: int, trees: Mapping[str, Any], meta: Meta, layout: StageLayout) -> None:
        """Starts saving items of arrays, which may be donated as soon as this returns.

        Waits for the previous save, if it is still under way. Layers are stacked as in `layout`.
        """
        saved = ocp.args.Composite(
            # A state of weights alone, such as an import makes, has no optimizer item.
            **{
                item: self._arguments(tree, save_args=_save_args(item, tree, layout))
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

    def quarantine(self, steps: Collection[int]) -> None:
        """Moves steps into the folder `quarantine`. All processes must call it."""
        if jax.process_index() == 0:
            self._guarded(lambda: [set_aside(self.folder(step)) for step in steps])
        any_process(False)  # the others look at the directory only after the move
        self._manager.reload()

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

    def _check_readable(self, step: int) -> None:
        """Raises StorageError if a save has ended but its files cannot be read back."""
        if jax.process_index() > 0:
            return
        folder = self.folder(step)
        saved = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
        missing = [
            path.name
            for path in saved
            if path.name not in self._without_arrays
            and not any((path / name).exists() for name in WHOLE)
        ]
        if missing or not saved:
            raise StorageError(
                f"{self.at(step)} was written but cannot be read back",
                found=f"{' and '.join(sorted(missing)) or 'nothing'} without a manifest",
                fix="another --run",
            )

    def _guarded(self, action):
        """Runs an action that writes. tensorstore reports a full disk as a ValueError.

        Removes unfinished saves of the action: a full disk needs the space.
        """
        try:
            return action()
        except (OSError, ValueError) as error:
            self._remove_unfinished()
            raise StorageError(
                f"cannot save a checkpoint: {' '.join(str(error).split())[:200]}",
                fix="room on its disk, or another --run",
            ) from error

    def _remove_unfinished(self) -> None:
        """Deletes the unfinished saves of this run."""
        self._saving = []
        self._failed = True
        if jax.process_index() == 0:
            for path in self._unfinished():
                shutil.rmtree(path, ignore_errors=True)

    def _keep_removing(self) -> None:
        """Deletes unfinished saves until none comes back.

        tensorstore recreates folders for writes that it has started, and these cannot be awaited.
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


class _Preserved:
    """A `Retention` behind the interface that Orbax expects."""

    def __init__(self, retention: Retention):
        self._retention = retention

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
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


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler with which only the first replica writes an array.

    By default Orbax slices replicated arrays across replicas, on the devices and all at the same
    time: a run over `data` that just fits would run out of memory at its first save.
    """
    arrays = type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _ByLayer(ocp.PyTreeCheckpointHandler):
    """A handler that lets Orbax describe the arrays of an item, and writes them layer by layer."""

    def __init__(self):
        # No array has so many replicas, so Orbax finds no part to write.
        nothing = type_handlers.ArrayHandler(use_replica_parallel=False, replica_id=sys.maxsize)
        registry = type_handlers.create_type_handler_registry((jax.Array, nothing))
        super().__init__(type_handler_registry=registry, use_compression=False)

    async def async_save(self, directory, item=None, save_args=None, args=None):
        """Returns the futures that Orbax waits for: of its own files, and of the arrays."""
        begun = await super().async_save(directory, item, save_args, args)
        return [*(begun or []), _WritesByLayer(directory, args)]


@ocp.args.register_with_handler(_ByLayer, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveByLayer(ocp.args.PyTreeSave):
    """The arguments by which Orbax finds the handler `_ByLayer`."""


class _WritesByLayer:
    """The arrays of an item, with the interface of the futures that Orbax waits for."""

    def __init__(self, directory: Any, args: Any):
        self._directory = directory
        self._args = args

    def result(self, timeout: int | None = None) -> None:
        """Writes the arrays; Orbax has already created the folder and described them in it."""
        del timeout
        folder = getattr(self._directory, "path", self._directory)
        stacked = {
            name: len(of_leaf.shard_axes)
            for name, of_leaf in leaves_of(self._args.save_args).items()
        }
        from spmdtrain.checkpoints.files.by_layer import write_by_layer

        write_by_layer(Path(folder), leaves_of(self._args.item), stacked)


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


def read_json(folder: "epath.Path") -> Any:
    """Returns the content of an item of JSON."""
    return ocp.JsonCheckpointHandler().restore(folder)


def read_plain(folder: "epath.Path", only: str | None = None) -> dict[str, np.ndarray]:
    """Returns every leaf of an item that is a flat dict, or just one, as whole numpy arrays."""
    tree = saved_tree(folder)
    check_sizes(leaves_of(tree), Path(folder))
    if only is not None:
        tree = {only: tree[only]}
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    arguments = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=only is not None)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=arguments)


def saved_tree(folder: "epath.Path") -> Any:
    """Returns the structure of an item, with descriptions of its leaves."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.name} is missing")
    tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    leaves = leaves_of(tree)
    check_names(leaves)
    check_chunks(leaves)
    return tree


def leaves_of(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def read_leaves(folder: "epath.Path", saved: Mapping[str, Any], abstract: Mapping[str, Any]) -> Any:
    """Returns the leaves of `saved` in `folder`, with the structure and shardings of `abstract`.

    Leaves are matched by name. The structures around them may differ: nodes without leaves, such as
    the state of a rule that keeps nothing, are ignored. The handler is called without a
    Checkpointer, in which a reading process would wait for one that has failed.
    """
    wanted = {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(abstract)}
    item = jax.tree_util.tree_map_with_path(lambda path, _: wanted[leaf_name(path)], saved)
    how = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype),
        item,
    )
    restored = ocp.PyTreeCheckpointHandler().restore(
        folder,
        args=ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True),
    )
    values = {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(restored)}
    return jax.tree_util.tree_map_with_path(lambda path, _: values[leaf_name(path)], abstract)
