"""Reads the configuration, the weights and the state of a run. Changes nothing.

Without a step, the newest intact checkpoint is read, with a line on standard error if a newer one
is damaged. A requested step is read or refused.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import code_of
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.model_code import SHIPPED, check_model_code
from spmdtrain.checkpoints.newest import read_newest
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config.arguments import as_flag, as_run, as_step
from spmdtrain.config.errors import CheckpointError, ConfigError, DamagedError, UnfitError
from spmdtrain.config.load import as_overrides, from_resolved
from spmdtrain.config.named_code import home_of
from spmdtrain.config.run_files import RunFiles
from spmdtrain.config.schema import RunConfig
from spmdtrain.config.schema.own import split_own
from spmdtrain.train.setup import Setup, check_setup
from spmdtrain.train.state import TrainState

T = TypeVar("T")


def run_config(run: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration of a run, its vocabulary resolved, with `a.b=c` strings on top.

    The mesh is that of the run: override `mesh.*` to use other devices. `model.make` and [own] are
    left out, because the directory may be somebody else's and they name code to run: pass yours as
    `shard(config, make=...)`. Raises CheckpointError if `run` is not a run directory, and
    ConfigError if an override cannot be applied.
    """
    overrides = as_overrides(overrides)
    return from_resolved(read_document(as_run(run, "run"))[0], overrides)


def restore(run: str | Path, setup: Setup, step: int | None = None) -> TrainState:
    """Returns the state of `run` after `step` steps, read into the shards of `setup`.

    Without `step` it is the newest intact state: see `read_step`.

    The mesh of `setup` may differ from the run's. Raises CheckpointError if there is no such
    checkpoint, if it belongs to another model or does not fit the model and the optimizer of
    `setup`, or if `setup` keeps an average of the weights and the checkpoint has none: only `run`
    starts one midway.
    """
    check_setup(setup)
    run, step = as_run(run, "run"), as_step(step)
    with contextlib.closing(Checkpoints(run, setup, keep=None)) as checkpoints:

        def read(at: int) -> tuple[TrainState, Meta]:
            checkpoints.check_items(at, setup.state)
            return checkpoints.restore(at, setup.state)

        with _naming_imported(run):
            at, (state, meta) = read_step(checkpoints, run, step, read)
    check_model_code(meta["model_code"], code_of(setup), f"step {at} of {run}")
    return state


@contextlib.contextmanager
def _naming_imported(run: Path) -> Iterator[None]:
    """Adds a remedy to the error of a checkpoint that does not fit because it is an import."""
    try:
        yield
    except UnfitError as error:
        if "imported" not in error.meta:
            raise
        raise CheckpointError(
            f"{run} holds an imported model: step 0, without optimizer state",
            fix=f"init_state(setup), with train.init_from={run} among the settings",
        ) from None


def weights(
    run: str | Path, step: int | None = None, *, ema: bool = False
) -> dict[str, np.ndarray]:
    """Returns the parameters of `run` after `step` steps as plain arrays.

    See `restore` for the step. They are whole, keyed by dotted path, in the dtype in which they
    were saved. Layers are stacked in order, [layers, ...], whatever pipeline wrote them. With `ema`
    each trained parameter is its float32 average, which a run with `optimizer.ema` has. Needs no
    mesh, no model and no devices. Raises CheckpointError if there is no such checkpoint, or no
    average in it.
    """
    run, step, ema = as_run(run, "run"), as_step(step), as_flag(ema, "ema")
    with contextlib.closing(SavedSteps(run)) as checkpoints:
        _, arrays = read_step(
            checkpoints, run, step, lambda at: checkpoints.read_weights(at, ema=ema)
        )
    return arrays


class NamedCode(NamedTuple):
    """The code that a run names: `make` as in model.make, and the settings of [own]."""

    make: str | None
    own: Mapping[str, Any]


def read_document(run: Path, own: Sequence[str] = ()) -> tuple[dict[str, Any], NamedCode]:
    """Returns (RUN/config.json without the code that it names, that code).

    Names in the files or modules `own` stay in it. Raises CheckpointError if the file is not such a
    document.
    """
    saved = RunFiles(run).config
    return saved, take_code(saved, own)


def take_code(saved: dict[str, Any], own: Sequence[str] = ()) -> NamedCode:
    """Takes the names of code out of the document of a run, and returns them.

    Names in the files or modules `own` stay in it.
    """
    make = saved["config"]["model"].pop("make", None)
    named = saved["config"].pop("own", None)
    if not isinstance(named, dict):  # a run of an older version
        return NamedCode(make, {})
    inside, outside = split_own(named, own)
    saved["config"]["own"] = inside
    return NamedCode(make, outside)


def refuse_own_code(run: Path, saved: dict[str, Any], named: NamedCode) -> None:
    """Raises ConfigError if a run's model is a custom one and the caller has not named it.

    `saved` and `named` are the results of `read_document`.
    """
    own = saved.get("model_code", {}).get("class", SHIPPED)
    if named.make or own != SHIPPED:
        raise ConfigError(
            f"{run} uses the model {named.make or own}, whose code runs only if you name it",
            fix=f"--make {named.make or 'FILE.py:CLASS'}",
        )


def refuse_own_parts(
    run: Path, named: NamedCode, parts: Collection[str], passed: Collection[str] = ()
) -> None:
    """Raises ConfigError if one of these parts of a run is code that the caller has not named.

    `parts` are the keywords of [own] that matter to the reader, `passed` those that the caller
    passes.
    """
    unnamed = {
        part: named.own[part] for part in parts if named.own.get(part) and part not in passed
    }
    if unnamed:
        part, name = next(iter(unnamed.items()))
        homes = dict.fromkeys(home_of(name) for name in unnamed.values())
        raise ConfigError(
            f"{run} uses own.{part}={name!r}, whose code runs only if you name it",
            fix=" ".join(f"--own {home}" for home in homes),
        )


def read_step(
    checkpoints: SavedSteps, run: Path, requested: int | None, read: Callable[[int], T]
) -> tuple[int, T]:
    """Returns the step that was read, and the result of `read(step)`.

    Without a requested step, damaged newer steps are skipped with a line on standard error. If the
    requested step is damaged, DamagedError names the newest readable one. Raises CheckpointError if
    there is none.
    """
    if requested is None:
        step, result, line = read_newest_good(checkpoints, run, read)
        if line and jax.process_index() == 0:
            print(f"spmdtrain: {line}", file=sys.stderr)
        return step, result
    saved = checkpoints.steps()
    if requested not in saved:
        listed = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"{run} holds no checkpoint of step {requested}", found=listed)
    try:
        return requested, read(requested)
    except DamagedError as error:
        others = (step for step in reversed(saved) if step != requested)
        good = next((step for step in others if _is_good(step, read)), None)
        fix = "another run: no step of this one can be read"
        if good is not None:
            fix = f"--step {good}"
        raise DamagedError(error.what, fix=fix) from error


def read_newest_good(
    checkpoints: SavedSteps, run: Path, read: Callable[[int], T]
) -> tuple[int, T, str]:
    """Returns (newest intact step, result of `read(step)`, warning).

    The warning is "" unless a newer step is damaged. Raises CheckpointError if there is no
    checkpoint.
    """
    read_one = read_newest(checkpoints, read)
    if read_one is None:
        fix = "training first: spmdtrain train CONFIG --run RUN, or the whole import once more"
        raise CheckpointError(f"{run} holds no checkpoint", fix=fix)
    step, result, damaged = read_one
    if not damaged:
        return step, result, ""
    newest, *more = damaged.values()
    others = f", and {len(more)} more are" if more else ""
    return step, result, f"{newest.what}{others}; step {step} is read instead"


def _is_good(step: int, read: Callable[[int], Any]) -> bool:
    try:
        read(step)
    except DamagedError:
        return False
    return True
