"""Checkpoints of a run: RUN/checkpoints/N holds the state after N completed steps. The only file that knows Orbax.

A step has three items: `params` (so that weights can be read alone), `state` (optimizer) and `meta` (JSON: which leaves
with which shapes, where the data stands). Orbax writes in the background into a temporary name and renames: a step
that is listed is complete. Restoring reads straight into the shards that the abstract state asks for, whatever mesh or
number of processes wrote it.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from spmdtrain.config.errors import CheckpointError, StorageError
from spmdtrain.train.state import TrainState

FORMAT = 1
Meta = dict[str, Any]
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save on several lines


class Checkpoints:
    """The checkpoints of one run directory. `keep`: how many of the newest stay; None: only read, change nothing."""

    def __init__(self, run: Path, keep: int | None):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=keep is not None, read_only=keep is None
        )
        try:
            self._manager = ocp.CheckpointManager((run / "checkpoints").absolute(), options=options)
        except OSError as error:
            raise StorageError(f"cannot write {run}: {error.strerror}") from None

    def newest(self) -> int | None:
        """The newest complete step, if there is one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: Meta) -> None:
        """Starts saving; `state` may be donated as soon as this returns. Waits for the save before it, if any."""
        meta = {"format": FORMAT, "leaves": leaves(state)} | meta
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            state=ocp.args.StandardSave(state.opt_state),
            meta=ocp.args.JsonSave(meta),
        )
        self._guarded(lambda: self._manager.save(step, args=items))

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Meta]:
        """The state saved at `step`, each leaf read into the sharding that `abstract` gives it."""
        meta = self._checked_meta(step, leaves(abstract))
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params), state=ocp.args.StandardRestore(abstract.opt_state)
        )
        found = self._read(step, items)
        counter = jax.make_array_from_callback((), abstract.step.sharding, lambda _: abstract.step.dtype.type(step))
        return TrainState(counter, found.params, found.state), meta

    def restore_params(self, step: int, params: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The weights alone."""
        self._checked_meta(step, leaves(params))
        return self._read(step, ocp.args.Composite(params=ocp.args.StandardRestore(params))).params

    def wait(self) -> None:
        """Returns when the last save is complete on disk."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        self._manager.close()

    def _checked_meta(self, step: int, asked: dict[str, list]) -> Meta:
        meta = self._read(step, ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
        if meta.get("format") != FORMAT:
            raise CheckpointError(
                f"{self._at(step)} has format {meta.get('format')}", found=f"this version reads {FORMAT}"
            )
        saved = meta["leaves"]
        for path in sorted(asked):
            if asked[path] != saved.get(path):
                raise CheckpointError(
                    f"{self._at(step)} does not fit: {path}",
                    asked=_described(asked[path]),
                    found=_described(saved.get(path)),
                    fix="the configuration that it was saved with, or another --run",
                )
        return meta

    def _read(self, step: int, items):
        try:
            with _without_stray_reads():
                return self._manager.restore(step, args=items)
        except (ValueError, OSError, KeyError) as error:
            cause = " ".join(str(error).split())[:200]
            before = max((other for other in self._manager.all_steps() if other < step), default=None)
            fix = "another run" if before is None else f"removing it: step {before} is there too"
            raise CheckpointError(f"{self._at(step)} cannot be read: {cause}", fix=fix) from error

    def _guarded(self, action):
        try:
            return action()
        except (OSError, ValueError) as error:
            if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, OSError):
                raise StorageError(f"cannot save a checkpoint: {' '.join(str(error).split())[:200]}") from error
            raise

    def _at(self, step: int) -> str:
        return f"checkpoint {self._manager.directory / str(step)}"


@contextlib.contextmanager
def _without_stray_reads() -> Iterator[None]:
    """Where a read fails, others are still under way; each ends in a thread that finds its event loop closed and would
    print a traceback around our one line (orbax-checkpoint 0.12 on tensorstore 0.1.86)."""
    hook = sys.unraisablehook

    def quiet(unraisable) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = quiet
    yield
    sys.unraisablehook = hook  # not after a failure: that is when they end


def newest_step(run: Path) -> int | None:
    """The newest checkpoint below `run`; reads directory names only."""
    found = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit() and path.is_dir()]
    return max(found, default=None)


def leaves(tree) -> dict[str, list]:
    """Path -> [shape, dtype] of every leaf: what two states must share for one to restore the other."""
    if isinstance(tree, TrainState):
        return leaves(tree.params) | {f"optimizer.{path}": leaf for path, leaf in leaves(tree.opt_state).items()}
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(leaf: list | None) -> str:
    return f"{leaf[1]}{leaf[0]}" if leaf else "nothing"
