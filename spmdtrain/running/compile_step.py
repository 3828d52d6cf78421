"""Traces and compiles the step of a run."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring

from spmdtrain.compiled import canonical, hlo
from spmdtrain.config.errors import ConfigError
from spmdtrain.running.report import stages
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import make_step

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # the name that jax gives the event


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """Returns the traced step. Raises UserError for what a model cannot do on this mesh."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        what = "jax compiles nothing, and a step is compiled"
        raise ConfigError(what, fix="unset JAX_DISABLE_JIT")
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
