"""Opens a run where a replay of its steps starts: at the last checkpoint before, or at step 0."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import check_identity, flat
from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.restore import (
    NamedCode,
    read_document,
    refuse_own_code,
    refuse_own_parts,
    take_code,
)
from spmdtrain.config.arguments import as_run
from spmdtrain.config.errors import CheckpointError, ConfigError
from spmdtrain.config.load import as_overrides, from_resolved, resolved
from spmdtrain.config.own_parts import with_own_parts
from spmdtrain.config.run_files import given_in
from spmdtrain.config.schema import RunConfig
from spmdtrain.config.settable import OF_PLACES, OF_REPLAY, check_settable
from spmdtrain.data.source import Data, open_data, recall_progress
from spmdtrain.lab.replay.read_bundle import is_bundle, read_bundle
from spmdtrain.lab.replay.written import WrittenRun, read_written
from spmdtrain.models.choose import MakeModel, check_make
from spmdtrain.running.compile_step import compile_step, lower_step, with_stages
from spmdtrain.running.start import kernels
from spmdtrain.running.start.other_run import naming_settings, recorded
from spmdtrain.running.start.sharding import shard_with_weights
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard_on
from spmdtrain.train.state import TrainState

# Settings that do not affect steps: a run may continue with other ones.
OF_NO_STEP = ("checkpoint.", "eval.", "log.", "data.read_ahead", "mesh.elastic")
OF_RATE = "train.steps"  # the rate of a step depends on it, unless the schedule is constant
SEAMS = ("optimizer", "learning_rate", "loss", "data")


@dataclass(frozen=True)
class Opened:
    """A run that is ready to be repeated from the state after `start` steps.

    `sample` is the global index of the next sample. Each call of `begin()` returns a new copy of
    that state, because a step donates its state. `step` is the compiled step. `prints` has the
    fingerprints of leaves in checkpoints after `start`, by step. `elsewhere` is True if the replay
    runs on another mesh than the run did. `optimizer` is the one that a caller passed, or None.
    """

    run: Path
    setup: Setup
    data: Data
    written: WrittenRun
    start: int
    sample: int
    begin: Callable[[], TrainState]
    step: Callable[..., Any]
    prints: Mapping[int, Mapping[str, Fingerprint]]
    elsewhere: bool
    optimizer: Any = None


@contextlib.contextmanager
def open_replay(  # noqa: PLR0913 - a keyword for each part that a caller may replace
    run: str | Path,
    step: int,
    *,
    to: int | None = None,
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    seams: Mapping[str, Any] | None = None,
    own: Sequence[str] = (),
    settable: Sequence[str] = OF_REPLAY,
) -> Iterator[Opened]:
    """Opens `run` at the newest checkpoint before `step`, for a replay up to `to`.

    `run` is the directory of a run, or a bundle whose bad step is no later than `step`. Without
    such a checkpoint the replay starts as the run did. `seams` are the optimizer=, learning_rate=,
    loss= and data= that were passed to the run; `own` are the files and modules whose code may run
    if [own] of the run names it. Raises UserError if the run has not taken these steps, or does not
    match its checkpoints.
    """
    run = as_run(run, "run")
    overrides = as_overrides(overrides)
    check_settable(overrides, settable)
    check_make(make)
    bundle = read_bundle(run) if is_bundle(run) else None
    written = bundle.written if bundle else read_written(run)
    last = step if to is None else to
    if bundle is None:
        written.check_steps(step, last)
    saved, named = settings_at(written, last, own)
    if not make:
        refuse_own_code(run, saved, named)
    caller_parts = dict.fromkeys(SEAMS) | dict(seams or {})
    of_bundle = {"data"} if bundle and bundle.data else set()
    refuse_own_parts(run, named, SEAMS, {part for part in SEAMS if caller_parts[part]} | of_bundle)
    config = from_resolved(saved, overrides)
    config.check_repeatable()
    if bundle and bundle.data and caller_parts["data"] is None:
        data = bundle.data
    else:
        config, data = open_data(config, caller_parts["data"])
    caller_parts = with_own_parts(config, caller_parts)
    holds = bundle.run if bundle else run
    parts = {name: caller_parts[name] for name in SEAMS if name != "data"}
    devices = devices or devices_of(config)
    setup = shard_with_weights(config, make, devices, data.tokenizer, **parts)
    elsewhere = any(not override.startswith(OF_PLACES) for override in overrides)
    with (
        kernels.decided(setup),
        contextlib.closing(Checkpoints(holds, setup, keep=None)) as checkpoints,
        naming_settings(holds, setup, data, caller_parts),
    ):
        source = _Source(holds, setup, data, written, checkpoints)
        opened = _opened(source, min(step, bundle.step) if bundle else step, elsewhere)
        if bundle and bundle.sample is not None and opened.start == (bundle.start or 0):
            opened = replace(opened, sample=bundle.sample)
        yield replace(opened, optimizer=caller_parts["optimizer"])


@dataclass(frozen=True)
class _Source:
    """The run that a replay reads from."""

    run: Path
    setup: Setup
    data: Data
    written: WrittenRun
    checkpoints: Checkpoints


def _opened(source: _Source, step: int, elsewhere: bool) -> Opened:
    checkpoints = source.checkpoints
    setup = source.setup
    saved_steps = checkpoints.steps()
    start = max((at for at in saved_steps if at < step), default=0)
    check_one_start(source.written, start, step)
    prints = {at: _prints_in(checkpoints.meta(at)) for at in saved_steps if at > start}
    sample = 0
    recorded_kernels: kernels.Names = {}
    if start in saved_steps:
        meta = checkpoints.meta(start)
        where = f"step {start} of {source.run}"
        check_identity(meta, setup, source.data, where, recorded(source.run))
        recall_progress(source.data, meta)
        checkpoints.check_items(start, setup.state)
        sample = meta["sample"]
        recorded_kernels = kernels.keep(meta, setup)
    lowered = lower_step(setup)
    compiled, report = compile_step(setup, lowered)
    compiled, _ = with_stages(setup, compiled, report, start)
    kernels.check_kept(recorded_kernels, f"step {start} of {source.run}")
    return Opened(
        run=source.run,
        setup=setup,
        data=source.data,
        written=source.written,
        start=start,
        sample=source.written.sample_after(start, sample),
        begin=_beginning(source, start if start in saved_steps else None),
        step=compiled,
        prints=prints,
        elsewhere=elsewhere,
    )


def settings_at(
    written: WrittenRun, step: int, own: Sequence[str] = ()
) -> tuple[dict[str, Any], NamedCode]:
    """Returns (the resolved settings of `step`, the code that they named).

    Only the parts of [own] in the files or modules `own` stay in the settings. A run of an older
    version has recorded only the settings of its last start.
    """
    start = written.start_of(step)
    if start is None:
        return read_document(written.run, own)
    saved = json.loads(json.dumps(start))  # a copy, which may be changed
    return saved, take_code(saved, own)


def check_one_start(written: WrittenRun, first: int, last: int) -> None:
    """Raises CheckpointError if the steps after `first`, up to `last`, had different settings."""
    if (changed := changed_setting(written, first, last)) is not None:
        after = written.start_of(last)
        assert after is not None, "a start with other settings is a start"
        raise CheckpointError(
            f"{written.run} was resumed at step {after['from_step']} with another {changed}, "
            "and holds no checkpoint of that step",
            fix=f"--step {after['from_step']} or an earlier one",
        )


def changed_setting(written: WrittenRun, first: int, last: int) -> str | None:
    """Returns the first setting that changed between the step after `first` and step `last`.

    None if none that affects steps has changed, or if an old run did not record them.
    """
    before, after = written.start_of(first + 1), written.start_of(last)
    if before is None or after is None:
        return None
    then, now = flat(given_in(before)), flat(given_in(after))
    is_constant = now.get("optimizer.schedule") == "constant" and not now.get("own.learning_rate")
    ignored = (*OF_NO_STEP, OF_RATE) if is_constant else OF_NO_STEP
    changed = (
        name
        for name in then | now
        if then.get(name) != now.get(name) and not name.startswith(ignored)
    )
    return next(changed, None)


def _prints_in(meta: Meta) -> dict[str, Fingerprint]:
    return {name: (first, second) for name, (first, second) in meta["fingerprints"].items()}


def _beginning(source: _Source, start: int | None) -> Callable[[], TrainState]:
    """Returns the function that makes the state after `start` steps, or if None a first state."""
    if start is not None:
        return lambda: source.checkpoints.restore(start, source.setup.state)[0]
    if source.setup.config.train.init_from:
        raise CheckpointError(
            f"{source.run} began with the weights of train.init_from, and holds no checkpoint "
            "before this step",
            fix="a step after its first checkpoint",
        )
    begun = [event for event in source.written.events if event.get("event") == "started"]
    if begun and begun[-1].get("init_from"):
        raise CheckpointError(
            f"{source.run} began with a state= from Python, and holds no checkpoint before this "
            "step",
            fix="a step after its first checkpoint",
        )
    return lambda: init_state(source.setup)


def devices_of(config: RunConfig) -> Sequence[jax.Device] | None:
    """Returns as many devices as the mesh needs, or None if it takes all."""
    sizes = config.mesh.sizes.values()
    if -1 in sizes:
        return None
    needed = math.prod(sizes)
    devices = jax.devices()
    if needed > len(devices):
        raise ConfigError(
            f"the mesh of the run needs {needed} devices",
            found=f"{len(devices)} x {devices[0].device_kind}",
            fix=f"--simulate-devices {needed}, or another mesh, as by --set mesh.data=-1",
        )
    return devices[:needed]


def with_changes(opened: Opened, overrides: Sequence[str], *, own_rate: bool = True) -> Opened:
    """Returns the same replay with `a.b=c` settings changed.

    Without `own_rate` the learning rate is that of the settings, even if a caller passed one. Items
    of the state that do not exist with the changed settings are left out.
    """
    before = opened.setup
    setup = shard_on(
        from_resolved(resolved(before.config), overrides),
        before.mesh,
        before.make,
        optimizer=opened.optimizer,
        learning_rate=before.learning_rate if own_rate else None,
        loss=before.loss,
    )
    step, report = compile_step(setup, lower_step(setup))
    step, _ = with_stages(setup, step, report, opened.start)

    def begin() -> TrainState:
        state = opened.begin()
        items = {name: value for name, value in state.items.items() if name in setup.state.items}
        return replace(state, items=items)

    return replace(opened, setup=setup, step=step, begin=begin)
