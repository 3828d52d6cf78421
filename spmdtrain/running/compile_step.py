"""The step of a run, traced and compiled."""

import time
from collections.abc import Callable
from typing import Any

import jax

from spmdtrain.compiled import hlo
from spmdtrain.config.errors import ConfigError
from spmdtrain.running.report import stages
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import make_step


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """Returns the traced step. Raises UserError for what a model cannot do on this mesh."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        what = "jax compiles nothing, and a step is compiled"
        raise ConfigError(what, fix="unset JAX_DISABLE_JIT")
    stages.enter("tracing the step")
    return make_step(setup).lower(setup.state, setup.batch)


def compile_step(setup: Setup, lowered: jax.stages.Lowered) -> tuple[Callable, dict[str, Any]]:
    """Returns the step as an executable, and the report for compiled.json."""
    stages.enter("compiling the step")
    start = time.perf_counter()
    step = lowered.compile()
    return step, hlo.report(step, setup.mesh, time.perf_counter() - start)
