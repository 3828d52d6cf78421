"""Traces and compiles the step of a run, one for each program that its stages need."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.monitoring

from spmdtrain.compiled import canonical, hlo
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema.train import TrainConfig
from spmdtrain.config.stage_timetable import TimedStage
from spmdtrain.running.report import stages
from spmdtrain.train.batch import Batch
from spmdtrain.train.setup import Setup
from spmdtrain.train.stages import setup_of, stages_of
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_step

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # the name that jax gives the event


class StagedStep:
    """The step of a run with `train.stages`: of each, its own compiled step.

    It counts the steps itself, because reading the number of a state waits for the step before.
    """

    def __init__(self, train: TrainConfig, steps: Mapping[TimedStage, Callable[..., Any]]):
        self._train = train
        self._steps = steps
        self._done = 0
        self._last: jax.Array | None = None  # the step of the state that it has returned

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        if state.step is not self._last:
            self._done = int(state.step)
        self._done += 1
        state, metrics = self._steps[self._train.stage_of(self._done)](state, batch)
        self._last = state.step
        return state, metrics


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """Returns the traced step, of the last stage if there are several.

    Raises UserError for what a model cannot do on this mesh, and for a stage that does not fit it.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        what = "jax compiles nothing, and a step is compiled"
        raise ConfigError(what, fix="unset JAX_DISABLE_JIT")
    for stage in stages_of(setup):
        setup_of(setup, stage)
    stages.enter("tracing the step")
    return make_step(setup).lower(setup.state, setup.batch)


def compile_step(setup: Setup, lowered: jax.stages.Lowered) -> tuple[Callable, dict[str, Any]]:
    """Returns the step as an executable, and the report for compiled.json.

    `from_cache` in it tells whether jax read the executable from its cache on disk.
    """
    stages.enter("compiling the step")
    start = time.perf_counter()
    with _cache_hits() as hits:
        step = lowered.compile()
    report = hlo.report(step, setup.mesh, time.perf_counter() - start)
    program = canonical.program(step.as_text() or "")
    return step, report | {"from_cache": bool(hits), "program": program}


def with_stages(
    setup: Setup, step: Callable, report: dict[str, Any], done: int = 0
) -> tuple[Callable, dict[str, Any]]:
    """Returns what `compile_step` has returned, for all of `train.stages`.

    The steps of stages that are over after `done` steps are left out. `stages` in the report has a
    report of each program but that of the last stage.
    """
    before = [
        earlier for earlier in stages_of(setup) if earlier.last is not None and earlier.last > done
    ]
    if not before:
        return step, report
    programs = {_decides(setup): step}
    steps = {stages_of(setup)[-1]: step}
    reports = []
    for stage in before:
        own = setup_of(setup, stage)
        if _decides(own) not in programs:
            lowered = make_step(own).lower(own.state, own.batch)
            programs[_decides(own)], own_report = compile_step(own, lowered)
            reports.append({"first": stage.first + 1, "last": stage.last} | own_report)
        steps[stage] = programs[_decides(own)]
    return StagedStep(setup.config.train, steps), report | {"stages": reports}


def _decides(setup: Setup) -> tuple[tuple[int, ...], int]:
    """Returns what distinguishes the programs of a run's stages: batch and frozen layers."""
    return setup.batch["tokens"].shape, setup.frozen


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Yields a list that grows with each executable that jax reads from its cache inside."""
    hits: list[str] = []

    def heard(event: str, **_: str | int) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(heard)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(heard)
