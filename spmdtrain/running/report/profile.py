"""Traces single steps for the profiler, into RUN/profile/stepN."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax

from spmdtrain.compiled.hlo import UNREADABLE
from spmdtrain.config.run_files import OPERATIONS, PROFILE
from spmdtrain.running.report.json_lines import write_document


@contextlib.contextmanager
def profiled(
    directory: Path, number: int, chosen: Collection[int], step: Callable[..., Any]
) -> Iterator[Callable[[Any], Any]]:
    """Traces the dispatch of step `number` if it is one of the `chosen`.

    Pass the results of the step through the function that this yields: it waits for the devices, so
    that the trace ends when the results are ready. The kinds of the instructions of the compiled
    `step` are written next to the trace, which has only their names.
    """
    if number not in chosen:
        yield lambda results: results
        return
    folder = directory / PROFILE / f"step{number}"
    with jax.profiler.trace(folder):
        yield jax.block_until_ready
    if jax.process_index() == 0:
        write_document(folder / OPERATIONS, _instructions(step))


def _instructions(step: Callable[..., Any]) -> dict[str, Any]:
    """Returns the sort of work and the part of each instruction; none if the text is unreadable."""
    from spmdtrain.compiled.operations import operations

    text = step.as_text() if isinstance(step, jax.stages.Compiled) else None
    try:
        instructions = operations(text or "")
    except UNREADABLE:
        return {}
    return {name: list(instruction) for name, instruction in instructions.items()}
