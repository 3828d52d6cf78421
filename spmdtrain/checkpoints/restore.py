"""Reads what a run has left: its configuration, weights and state. Changes nothing.

Whoever asks for no step gets the newest that is as it was saved, and a line where that is not the
newest there is. A step that was asked for is read or refused.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from spmdtrain.checkpoints.identity import code_of
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.model_code import SHIPPED, check_model_code
from spmdtrain.checkpoints.newest import read_newest
from spmdtrain.checkpoints.store import Checkpoints
from spmdtrain.config.errors import CheckpointError, ConfigError, DamagedError
from spmdtrain.config.given import as_flag, as_path, as_step
from spmdtrain.config.load import as_overrides, from_resolved
from spmdtrain.config.run_files import RunFiles
from spmdtrain.config.schema import RunConfig
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState

T = TypeVar("T")


def run_config(run: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, its vocabulary resolved, with `a.b=c` strings on top.

    The mesh is that of the run: override `mesh.*` to have it on other devices. Its `model.make` is
    left out, because a directory may come from somebody else, and that setting names code to run:
    `shard(config, make=...)` takes yours. Raises CheckpointError where `run` is no run directory,
    ConfigError where an override cannot be obeyed.
    """
    overrides = as_overrides(overrides)
    return from_resolved(read_document(as_path(run, "run"))[0], overrides)


def restore(run: str | Path, setup: Setup, step: int | None = None) -> TrainState:
    """The state of `run` after `step` steps, read into the shards of `setup`.

    Without `step` it is the newest that is as it was saved: see `read_step`.

    The mesh of `setup` may differ from the run's. Raises CheckpointError where there is no such
    checkpoint, or it does not fit the model and the optimizer of `setup`, or is of another model,
    or has no average of the weights where `setup` is to keep one: only `run` begins one on the way.
    """
    check_setup(setup)
    run, step = as_path(run, "run"), as_step(step)
    with _opened(run, setup) as checkpoints:

        def read(at: int) -> tuple[TrainState, Meta]:
            checkpoints.check_items(at, setup.state)
            return checkpoints.restore(at, setup.state)

        at, (state, meta) = read_step(checkpoints, run, step, read)
    check_model_code(meta.get("model_code"), code_of(setup), f"step {at} of {run}")
    return state


def weights(
    run: str | Path, step: int | None = None, *, ema: bool = False
) -> dict[str, np.ndarray]:
    """The parameters of `run` after `step` steps as plain arrays; as `restore` chooses the step.

    By dotted path, whole, in the dtype in which they rest; those of the layers are stacked,
    [layers, ...], in order, whatever pipeline wrote them. With `ema` each that was trained is its
    average, float32, which the run has with `optimizer.ema`. Needs no mesh, no model and no
    devices. Raises CheckpointError where there is no such checkpoint, or no average in it.
    """
    run, step, ema = as_path(run, "run"), as_step(step), as_flag(ema, "ema")
    with _opened(run, None) as checkpoints:
        _, found = read_step(
            checkpoints, run, step, lambda at: checkpoints.read_weights(at, ema=ema)
        )
    return found


def read_document(run: Path) -> tuple[dict[str, Any], str | None]:
    """RUN/config.json, as `config_document` wrote it, without its `model.make`; and that.

    CheckpointError where it is none.
    """
    saved = RunFiles(run).config
    return saved, saved["config"]["model"].pop("make", None)


def refuse_own_code(run: Path, saved: dict[str, Any], named: str | None) -> None:
    """ConfigError where a run's model is not the shipped one, and nobody has said which it is.

    `saved` and `named` are what `read_document` gives.
    """
    own = saved.get("model_code", {}).get("class", SHIPPED)
    if named or own != SHIPPED:
        raise ConfigError(
            f"{run} is of {named or own}, code that runs only if you say so",
            fix=f"--make {named or 'FILE.py:CLASS'}",
        )


def read_step(
    checkpoints: Checkpoints, run: Path, asked: int | None, read: Callable[[int], T]
) -> tuple[int, T]:
    """The step that is read, and what `read(step)` gives.

    Where no step was asked for, a newer one that is damaged costs a line on standard error, and the
    one before it is read. A step that was asked for and is damaged is refused: DamagedError names
    the newest that could be read. CheckpointError where there is none.
    """
    if asked is None:
        step, found, line = read_newest_good(checkpoints, run, read)
        if line and jax.process_index() == 0:
            print(f"spmdtrain: {line}", file=sys.stderr)
        return step, found
    there = checkpoints.steps()
    if asked not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"{run} holds no checkpoint of step {asked}", found=listed)
    try:
        return asked, read(asked)
    except DamagedError as error:
        others = (step for step in reversed(there) if step != asked)
        good = next((step for step in others if _is_good(step, read)), None)
        fix = "another run: no step of this one can be read"
        if good is not None:
            fix = f"--step {good}"
        raise DamagedError(error.what, fix=fix) from error


def read_newest_good(
    checkpoints: Checkpoints, run: Path, read: Callable[[int], T]
) -> tuple[int, T, str]:
    """The newest step that is as it was saved, what `read(step)` gives, and a line.

    The line is "" unless a newer step is damaged. CheckpointError where there is none at all.
    """
    read_one = read_newest(checkpoints, read)
    if read_one is None:
        fix = "training first: spmdtrain train CONFIG --run RUN"
        raise CheckpointError(f"{run} holds no checkpoint", fix=fix)
    step, found, damaged = read_one
    if not damaged:
        return step, found, ""
    newest, *more = damaged.values()
    others = f", and {len(more)} more are" if more else ""
    return step, found, f"{newest.what}{others}; step {step} is read in its place"


def _is_good(step: int, read: Callable[[int], Any]) -> bool:
    try:
        read(step)
    except DamagedError:
        return False
    return True


def _opened(run: Path, setup: Setup | None) -> contextlib.closing[Checkpoints]:
    return contextlib.closing(Checkpoints(run, setup, keep=None))
