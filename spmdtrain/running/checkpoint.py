"""Checkpoints of a run: RUN/checkpoints/N holds the state after N completed steps.

This is the only file that knows Orbax. A step has three items: `params`, so that weights can be
read alone, `state` (of the optimizer), and `meta`, a JSON object that says which leaves there are,
with which shapes, and where the data stands. Orbax writes in the background under a temporary name
and renames, so that a step that is listed is complete. Restoring reads straight into the shards
that the abstract state asks for, whatever mesh or number of processes wrote them. Stacked layers
are saved in the pipeline layout in which they rest; where another is asked for, they are read and
laid out anew, one parameter at a time.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import type_handlers

from spmdtrain.config.errors import CheckpointError, StorageError, UserError
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.pipeline.layout import Layout, lay_out
from spmdtrain.train.state import TrainState

FORMAT = 1
OPTIMIZER = "optimizer."  # before the names of its leaves, in meta
Meta = dict[str, Any]
# Orbax logs several lines for every save, and a traceback per thread for a failure, which comes
# back as one exception anyway.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


class Checkpoints:
    """The checkpoints of one run directory.

    `model` is the one whose state is saved and restored; None if only `read_weights` is asked for.
    `keep` is how many of the newest stay; with None they are only read, and nothing is changed.
    """

    def __init__(self, run: Path, model: AbstractModel | None, keep: int | None):
        self._model = model
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=keep is not None, read_only=keep is None
        )
        handlers = {
            "params": _array_handler(),
            "state": _array_handler(),
            "meta": ocp.JsonCheckpointHandler(),
        }
        self._saving: list[int] = []
        try:
            directory = (run / "checkpoints").absolute()
            self._manager = ocp.CheckpointManager(
                directory, options=options, item_handlers=handlers
            )
        except OSError as error:
            raise StorageError(f"cannot write {run}: {error.strerror}") from None

    def newest(self) -> int | None:
        """The newest complete step, if there is one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: Meta) -> None:
        """Starts saving; `state` may be donated as soon as this returns.

        Waits for the save before it, if one is under way. `completed` says when it is on disk.
        """
        layout = self._model.layout.describe()
        meta = {
            "format": FORMAT,
            "leaves": leaves(state.params, state.opt_state),
            "layout": layout,
        } | meta
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(state.params),
            state=ocp.args.PyTreeSave(state.opt_state),
            meta=ocp.args.JsonSave(meta),
        )
        self._guarded(lambda: self._manager.save(step, args=items))
        self._saving.append(step)

    def completed(self) -> list[int]:
        """The steps whose saves have become complete on disk since this was last asked."""
        if not self._saving:
            return []
        if self._manager.is_saving_in_progress():
            # It is the last one, which began when those before it had ended.
            done = self._saving[:-1]
            self._saving = self._saving[-1:]
            return done
        self.wait()  # raises if a save failed
        done = self._saving
        self._saving = []
        return done

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The state saved at `step`, each leaf read into the sharding that `abstract` gives it."""
        meta, saved = self._checked_meta(step, abstract.params, abstract.opt_state)
        params = self._restored(step, "params", abstract.params, saved)
        opt_state = self._restored(step, "state", abstract.opt_state, saved)
        counter = jax.make_array_from_callback(
            (), abstract.step.sharding, lambda _: abstract.step.dtype.type(step)
        )
        return TrainState(counter, params, opt_state), meta

    def restore_params(
        self, step: int, params: dict[str, jax.ShapeDtypeStruct]
    ) -> tuple[dict[str, jax.Array], Meta]:
        """The weights alone."""
        meta, saved = self._checked_meta(step, params)
        return self._restored(step, "params", params, saved), meta

    def read_weights(self, step: int) -> dict[str, np.ndarray]:
        """The weights alone as plain arrays, layers in order; needs neither model nor mesh."""

        def read() -> dict[str, np.ndarray]:
            meta, saved = self._meta(step)
            directory = self._manager.directory / str(step) / "params"
            with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
                found = _read_plain(reader, directory)
            return {
                path: _in_order(path, found[path], saved)
                for path in meta["leaves"]
                if path in found
            }

        return self._read(step, read)

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Returns when the last save is complete on disk."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        self._manager.close()

    def _restored(
        self, step: int, item: str, asked: dict[str, Any], saved: Layout
    ) -> dict[str, Any]:
        """The item's leaves by parameter, each in the shape and sharding of `asked`."""
        directory = self._manager.directory / str(step) / item
        with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
            tree = self._read(step, lambda: _saved_tree(reader, directory))

            def read(paths: Iterable[str], shapes: Mapping[str, Any]) -> dict[str, Any]:
                return self._read(
                    step,
                    lambda: _read_leaves(
                        reader, directory, {path: tree[path] for path in paths}, shapes
                    ),
                )

            if saved == self._model.layout:
                return read(asked, asked)
            return {path: self._relaid(read, path, asked[path], saved) for path in asked}

    def _relaid(self, read: Callable[..., dict[str, Any]], path: str, asked, saved: Layout):
        """One parameter's leaves, read as they were saved and laid out as asked."""
        found = read([path], {path: self._as_saved(path, asked, saved)})[path]
        if not self._model.in_stack(path):
            return found
        shardings = jax.tree.map(lambda x: x.sharding, asked)
        staged = self._model.layout.staged
        relay = jax.jit(
            lambda tree: jax.tree.map(lambda x: staged(saved.unstaged(x)), tree),
            out_shardings=shardings,
        )
        return relay(found)

    def _as_saved(self, path: str, tree, saved: Layout):
        """Shapes of a parameter's leaves in the saved layout.

        They are split over the mesh much as they will be.
        """
        if not self._model.in_stack(path):
            return tree
        leading = len(self._model.layout.shape)

        def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = saved.shape + x.shape[leading:]
            if not isinstance(x.sharding, NamedSharding):
                return jax.ShapeDtypeStruct(shape, x.dtype)
            mesh = x.sharding.mesh
            unnamed = [None] * (len(x.shape) - len(x.sharding.spec))
            spec = [*x.sharding.spec, *unnamed]
            stages = mesh.shape["pipeline"]
            split = next((at for at, size in enumerate(saved.shape) if size % stages == 0), None)
            over = [
                "pipeline" if at == split and stages > 1 else None for at in range(len(saved.shape))
            ]
            return jax.ShapeDtypeStruct(
                shape, x.dtype, sharding=NamedSharding(mesh, P(*over, *spec[leading:]))
            )

        return jax.tree.map(leaf, tree)

    def _checked_meta(self, step: int, *trees: Mapping[str, Any]) -> tuple[Meta, Layout]:
        """The checkpoint's meta and layout, after a check that its leaves fit those of `trees`.

        The trees are the abstract parameters and, if it is restored too, the optimizer state.
        """
        meta, layout_saved = self._read(step, lambda: self._meta(step))
        layout, saved = self._model.layout, meta["leaves"]
        if layout_saved.layers != layout.layers:
            raise CheckpointError(
                f"{self._at(step)} does not fit",
                asked=f"model.layers={layout.layers}",
                found=f"{layout_saved.layers} layers",
                fix="the configuration that it was saved with, or another --run",
            )
        asked = leaves(
            *(
                {path: self._as_saved(path, x, layout_saved) for path, x in tree.items()}
                for tree in trees
            )
        )
        if len(trees) == 1:  # weights alone
            saved = {path: leaf for path, leaf in saved.items() if not path.startswith(OPTIMIZER)}
        surplus = sorted(saved.keys() - asked.keys())
        for path in [*sorted(asked), *surplus]:
            if asked.get(path) != saved.get(path):
                raise CheckpointError(
                    f"{self._at(step)} does not fit: {path}",
                    asked=_described(asked.get(path)),
                    found=_described(saved.get(path)),
                    fix="the configuration that it was saved with, or another --run",
                )
        return meta, layout_saved

    def _meta(self, step: int) -> tuple[Meta, Layout]:
        """The meta of a step, and the layout in which its stacked layers were saved."""
        meta = self._manager.restore(
            step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
        ).meta
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"{self._at(step)} has format {meta['format']}",
                found=f"this version reads {FORMAT}",
            )
        if "leaves" not in meta:
            raise KeyError("its meta names no leaves")
        if "layout" in meta:
            return meta, Layout(**meta["layout"])
        return meta, lay_out(self._model.layout.layers, 1, 1) if self._model else None

    def _read(self, step: int, read: Callable[[], Any]):
        try:
            with _without_stray_errors():
                return read()
        except (UserError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises nothing narrower where a data file is damaged
            cause = " ".join(str(error.__cause__ or error).split())[:200]
            before = max(
                (other for other in self._manager.all_steps() if other < step), default=None
            )
            fix = "another run" if before is None else f"removing it: step {before} is there too"
            raise CheckpointError(f"{self._at(step)} cannot be read: {cause}", fix=fix) from error

    def _guarded(self, action):
        """Runs an action that writes. tensorstore reports a full disk as a ValueError."""
        try:
            with _without_stray_errors():
                return action()
        except (OSError, ValueError) as error:
            raise StorageError(
                f"cannot save a checkpoint: {' '.join(str(error).split())[:200]}"
            ) from error

    def _at(self, step: int) -> str:
        return f"checkpoint {self._manager.directory / str(step)}"


@contextlib.contextmanager
def _without_stray_errors() -> Iterator[None]:
    """Hides tracebacks of other threads when a read or a write fails.

    Other reads are still under way then. Each ends in a thread that finds its event loop closed and
    would print a traceback around our one line (orbax-checkpoint 0.12 on tensorstore 0.1.86).
    """
    hook = sys.unraisablehook

    def quiet(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = quiet
    yield
    sys.unraisablehook = hook  # not after a failure: that is when they end


def newest_step(run: Path) -> int | None:
    """The newest checkpoint below `run`; reads directory names only."""
    folders = [path for path in (run / "checkpoints").glob("*") if path.is_dir()]
    return max((int(path.name) for path in folders if path.name.isdigit()), default=None)


def leaves(
    params: Mapping[str, Any], opt_state: Mapping[str, Any] | None = None
) -> dict[str, list]:
    """Path -> [shape, dtype] of every leaf. A state restores another only if they are equal."""
    named = {
        prefix + _name(path): leaf
        for prefix, tree in (("", params), (OPTIMIZER, opt_state))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in named.items()}


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    """A handler that has every array written by its first replica alone.

    Orbax would cut replicated arrays into a slice for each replica, on the devices and all at once:
    a run over `data` that just fits would run out of memory at its first save.
    """
    arrays = type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _read_plain(reader: ocp.Checkpointer, directory) -> dict[str, np.ndarray]:
    """Every leaf of an item that is a flat dict, whole, as a numpy array."""
    tree = _saved_tree(reader, directory)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return reader.restore(directory, args=ocp.args.PyTreeRestore(tree, restore_args=how))


def _in_order(path: str, x: np.ndarray, saved: Layout | None) -> np.ndarray:
    """A parameter with its layers, if it has any, as [layers, ...]."""
    if (
        saved is None
        or not path.startswith("blocks.")
        or x.shape[: len(saved.shape)] != saved.shape
    ):
        return x
    return saved.unstaged(x)


def _saved_tree(reader: ocp.Checkpointer, directory) -> Any:
    """The structure of an item, with descriptions of its leaves."""
    if not directory.exists():
        raise FileNotFoundError(f"{directory.name} is missing")
    return reader.metadata(directory).item_metadata.tree


def _read_leaves(
    reader: ocp.Checkpointer, directory, saved: Mapping[str, Any], asked: Mapping[str, Any]
) -> Any:
    """The leaves of the tree `saved` in `directory`, with the structure and shardings of `asked`.

    Leaves are found by name. The structures around them may differ: a node without leaves, such as
    the state of a rule that keeps nothing, has no part in it.
    """
    wanted = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(asked)}
    item = jax.tree_util.tree_map_with_path(lambda path, _: wanted[_name(path)], saved)
    how = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype),
        item,
    )
    found = reader.restore(
        directory, args=ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
    )
    values = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(found)}
    return jax.tree_util.tree_map_with_path(lambda path, _: values[_name(path)], asked)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _described(leaf: list | None) -> str:
    return f"{leaf[1]}{leaf[0]}" if leaf else "nothing"
