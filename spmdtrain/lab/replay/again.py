"""Repeats steps of a run from a state, with the same samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from spmdtrain.lab.replay.opened import Opened
from spmdtrain.running.device_batches import batches
from spmdtrain.running.report.json_lines import numbers
from spmdtrain.train.batch import Batch
from spmdtrain.train.state import TrainState


@dataclass(frozen=True)
class Again:
    """A repeated step: its figures on the host, and the state after it.

    `figures` are in the form of metrics.jsonl: float32 as a Python float, None if not finite. The
    next step donates `state`.
    """

    step: int
    figures: dict[str, Any]
    state: TrainState
    batch: Batch


def steps_again(
    opened: Opened,
    last: int,
    *,
    state: TrainState | None = None,
    change: Callable[[int, Batch], Batch] | None = None,
) -> Iterator[Again]:
    """Yields the steps after `opened.start`, up to `last`.

    They start from `state`, if there is one; it is donated. `change(step, batch)` returns the batch
    that replaces the run's.
    """
    held = opened.begin() if state is None else state
    with batches(opened.setup, opened.data, opened.start, opened.sample) as ahead:
        for step in range(opened.start + 1, last + 1):
            batch = next(ahead)
            if change is not None:
                batch = change(step, batch)
            held, metrics = opened.step(held, batch)
            yield Again(step, figures_of(metrics), held, batch)


def figures_of(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the scalars of a step in the form of metrics.jsonl. Waits for the devices."""
    return numbers({name: float(value) for name, value in jax.device_get(metrics).items()})
