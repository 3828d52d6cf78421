"""Traces of single steps for the profiler, RUN/profile/stepN."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax


@contextlib.contextmanager
def profiled(directory: Path, step: int, chosen: Collection[int]) -> Iterator[Callable[[Any], Any]]:
    """Traces the dispatch of `step` if it is one of the `chosen`.

    Pass the results of the step through the function that this yields: it waits for the devices, so
    that the trace ends when the results are ready.
    """
    if step not in chosen:
        yield lambda results: results
        return
    with jax.profiler.trace(directory / "profile" / f"step{step}"):
        yield jax.block_until_ready
