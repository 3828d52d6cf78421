"""Reads what a run has left: its configuration, weights and state. Changes nothing."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.load import from_resolved
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.checkpoint import Checkpoints
from spmdtrain.running.identity import code_of
from spmdtrain.running.model_code import SHIPPED, check_model_code
from spmdtrain.train.setup import Setup
from spmdtrain.train.state import TrainState


def run_config(run: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, its vocabulary resolved, with `a.b=c` strings on top.

    The mesh is that of the run: override `mesh.*` to have it on other devices. Its `model.make` is
    left out, because a directory may come from somebody else, and that setting names code to run:
    `shard(config, make=...)` takes yours. Raises CheckpointError where `run` is no run directory,
    ConfigError where an override cannot be obeyed.
    """
    return from_resolved(read_document(Path(run))[0], overrides)


def restore(run: str | Path, setup: Setup, step: int | None = None) -> TrainState:
    """The state of `run` after `step` steps (default: the newest), read into the shards of `setup`.

    The mesh of `setup` may differ from the run's. Raises CheckpointError where there is no such
    checkpoint, or it does not fit the model and the optimizer of `setup`, or is of another model,
    or has no average of the weights where `setup` is to keep one: only `run` begins one on the way.
    """
    with _opened(run, setup) as checkpoints:
        at = chosen_step(checkpoints, Path(run), step)
        if setup.state.ema:
            checkpoints.check_ema(at)
        state, meta = checkpoints.restore(at, setup.state)
    check_model_code(meta.get("model_code"), code_of(setup), f"step {at} of {run}")
    return state


def weights(
    run: str | Path, step: int | None = None, *, ema: bool = False
) -> dict[str, np.ndarray]:
    """The parameters of `run` after `step` steps (default: the newest) as plain arrays.

    By dotted path, whole, in the dtype in which they rest; those of the layers are stacked,
    [layers, ...], in order, whatever pipeline wrote them. With `ema` each that was trained is its
    average, float32, which the run has with `optimizer.ema`. Needs no mesh, no model and no
    devices. Raises CheckpointError where there is no such checkpoint, or no average in it.
    """
    with _opened(run, None) as checkpoints:
        return checkpoints.read_weights(chosen_step(checkpoints, Path(run), step), ema=ema)


def read_document(run: Path) -> tuple[dict[str, Any], str | None]:
    """RUN/config.json, as `config_document` wrote it, without its `model.make`; and that.

    CheckpointError where it is none.
    """
    path = run / "config.json"
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        cause = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{run} is not a run directory: {path}: {cause}", fix="what training was given as --run"
        ) from None
    match saved:
        case {"config": {"model": {"vocab": int()}}, "origin": dict()}:
            return saved, saved["config"]["model"].pop("make", None)
        case _:
            what = f"{run} is not a run directory: {path} holds no resolved config"
            raise CheckpointError(what)


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


def newest(checkpoints: Checkpoints, run: Path) -> int:
    """The newest step; CheckpointError where there is none."""
    found = checkpoints.newest()
    if found is None:
        fix = "training first: spmdtrain train CONFIG --run RUN"
        raise CheckpointError(f"{run} holds no checkpoint", fix=fix)
    return found


def _opened(run: str | Path, setup: Setup | None) -> contextlib.closing[Checkpoints]:
    return contextlib.closing(Checkpoints(Path(run), setup, keep=None))


def chosen_step(checkpoints: Checkpoints, run: Path, asked: int | None) -> int:
    """The step that was asked for, or the newest; CheckpointError where there is none."""
    if asked is None:
        return newest(checkpoints, run)
    there = checkpoints.steps()
    if asked not in there:
        found = ", ".join(map(str, there)) or "none"
        raise CheckpointError(f"{run} holds no checkpoint of step {asked}", found=found)
    return asked
