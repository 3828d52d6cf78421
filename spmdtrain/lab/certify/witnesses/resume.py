"""Compares a run in three parts with the same run in one, and moves a checkpoint through layouts.

Comparing restored states would not do, since restoring may lose the same on both sides. So Orbax
reads the checkpoints of the two runs, and the state that moves through layouts is known before it
is saved.
"""

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import identity
from spmdtrain.checkpoints.meta import named_leaves
from spmdtrain.checkpoints.restore import restore
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config import RunConfig, from_resolved, resolved
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.data.source import open_data
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.witness import Witness
from spmdtrain.running import loop
from spmdtrain.train.compared.in_order import STEP, Leaf, Plain, placed_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState

EVERY = 2  # steps between checkpoints
CUTS = (2, 4)  # the steps after which the run is stopped
SETTINGS = (
    *(f"checkpoint.every={EVERY}", "checkpoint.keep=9", "log.every=1"),
    *("checkpoint.memory_every=0", "checkpoint.memory_peer=false"),  # which need a launcher
)
PARTS = "a run in three parts is the run in one, to the bit"
ELSEWHERE = "its checkpoint is the same in other layouts"
ALONE = Layout((), "one device")


def resumed(small: RunConfig, layouts: Sequence[Layout], plain: Plain, own: Own) -> list[Witness]:
    """Returns the two witnesses of resuming a run.

    `small` is the run on one device, and `layouts` are those that agree with it. One of them is
    resumed, preferably one with a pipeline. The state `plain` is moved through several.
    """
    if not layouts:
        return []
    chosen = next((layout for layout in layouts if layout.has_stages), layouts[0])
    with _silent():
        unlike = _parts_unlike(small, chosen, own)
        padded = [layout for layout in _first_padded(small, layouts, own) if layout != chosen]
        places = [ALONE, chosen, *padded, ALONE]
        lost = move_through(small, places, plain, own)
    return [Witness(PARTS, not unlike, unlike), Witness(ELSEWHERE, not lost, lost)]


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Returns the run with `a.b=c` strings on top."""
    return from_resolved(resolved(config), settings)


# A run in parts


def _parts_unlike(small: RunConfig, layout: Layout, own: Own) -> str:
    """Returns how the newest checkpoints differ, of the run in one part and of that in three."""
    config = with_settings(small, (*layout.overrides, *SETTINGS))
    devices = jax.devices()[: layout.devices]
    with tempfile.TemporaryDirectory() as room:
        whole, cut = Path(room) / "whole", Path(room) / "cut"
        _run(config, whole, devices, own, None)
        for at in (*CUTS, None):
            _run(config, cut, devices, own, at)
        return _unlike(_held(whole), _held(cut))


def _run(
    config: RunConfig, directory: Path, devices: Sequence[jax.Device], own: Own, stop: int | None
) -> None:
    def hook(event: str, step: int, _) -> bool:
        return event == "step" and stop is not None and step >= stop - 1

    loop.run(
        config,
        directory,
        make=own.make,
        devices=devices,
        optimizer=own.optimizer,
        learning_rate=own.learning_rate,
        loss=own.loss,
        hooks=[hook],
    )


def _held(run: Path) -> dict[str, Any]:
    """Returns the arrays and the meta of the newest checkpoint of a run, by name."""
    with contextlib.closing(SavedSteps(run)) as saved:
        newest = saved.newest()
        assert newest is not None, "the last step is always saved"
        return saved.meta(newest) | saved.read_arrays(newest)


# A state in other layouts


def _first_padded(small: RunConfig, layouts: Sequence[Layout], own: Own) -> list[Layout]:
    """Returns the first layout that pads a dim other than the first one, if there is one.

    Nearly any wrong code cuts off padding correctly that follows all rows, but not padding that
    follows each row.
    """

    def pads(layout: Layout) -> bool:
        padding = _setup(small, layout, own).padding
        return any(padding.at_rest[path][1:] != x[1:] for path, x in padding.of_model.items())

    return [layout for layout in layouts if pads(layout)][:1]


def move_through(small: RunConfig, layouts: Sequence[Layout], plain: Plain, own: Own) -> str:
    """Saves a state in the first layout, restores it in the next, saves it there, and so on.

    Returns the first leaves that change, and in which layout; "" if none does.
    """
    step = int(plain[Leaf(STEP)])
    with tempfile.TemporaryDirectory() as room:
        before: Path | None = None
        for number, layout in enumerate(layouts):
            setup = _setup(small, layout, own)
            want = placed_state(setup, plain)
            state = want if before is None else restore(before, setup, step)
            if lost := _unlike(_leaves_of(want), _leaves_of(state)):
                return f"{lost}, restored in {layout.name}"
            before = Path(room) / str(number)
            _save(setup, before, state)
            with contextlib.closing(SavedSteps(before)) as saved:
                saved_arrays = saved.read_arrays(step)
            held = {name: x for name, x in _leaves_of(want).items() if name in saved_arrays}
            if lost := _unlike(held, saved_arrays):
                return f"{lost}, saved in {layout.name}"
    return ""


def _setup(small: RunConfig, layout: Layout, own: Own) -> Setup:
    config, _ = open_data(with_settings(small, layout.overrides))
    return own.shard(config, jax.devices()[: layout.devices])


def _save(setup: Setup, run: Path, state: TrainState) -> None:
    keep = Retention(CheckpointConfig(keep=1))
    with contextlib.closing(Checkpoints(run, setup, keep)) as checkpoints:
        checkpoints.save(int(state.step), state, identity(setup, "", {}))


def _leaves_of(state: TrainState) -> dict[str, np.ndarray]:
    """Returns every leaf of a state at rest, by its name in a checkpoint."""
    trees = {"params": state.params, "state": state.opt_state, **state.items}
    return {name: np.asarray(x) for name, x in named_leaves(trees).items()}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns the first names whose values are not bit-equal."""

    def same(name: str) -> bool:
        if name not in one or name not in other:
            return False
        mine, theirs = one[name], other[name]
        if not isinstance(mine, np.ndarray):
            return mine == theirs
        return mine.dtype == theirs.dtype and np.array_equal(
            mine, theirs, equal_nan=mine.dtype.kind == "f"
        )

    return ", ".join(sorted(name for name in one.keys() | other.keys() if not same(name))[:3])


@contextlib.contextmanager
def _silent():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
