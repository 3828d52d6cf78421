"""Finds the checkpoint from which a run goes on: the newest that is as it was saved.

A newer one that is damaged is set aside, not deleted, and the run takes its steps again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.store import Checkpoints
from spmdtrain.config.errors import CheckpointError, DamagedError
from spmdtrain.train.state import TrainState

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read. `damaged`: why each newer step could not be, newest first."""

    step: int
    state: TrainState
    meta: Meta
    damaged: dict[int, DamagedError] = field(default_factory=dict)


def newest_good(
    checkpoints: Checkpoints, abstract: TrainState, before: int | None = None
) -> Found | None:
    """Reads the newest state, or the newest before those that are damaged; see `read_newest`.

    Raises CheckpointError where one does not fit `abstract`.
    """
    found = read_newest(checkpoints, lambda step: checkpoints.restore(step, abstract), before)
    if found is None:
        return None
    step, (state, meta), damaged = found
    return Found(step, state, meta, damaged)


def read_newest(
    checkpoints: Checkpoints, read: Callable[[int], T], before: int | None = None
) -> tuple[int, T, dict[int, DamagedError]] | None:
    """Calls `read(step)` for the newest checkpoint, and for older ones while it finds damage.

    Returns the step, what was read, and why each newer step could not be, newest first; None if
    there is no checkpoint at all. Changes nothing. With `before`, only those of earlier steps are
    looked at. Raises CheckpointError where all that there are are damaged: a run does not begin
    anew by itself.
    """
    damaged: dict[int, DamagedError] = {}
    for step in reversed(checkpoints.steps()):
        if before is not None and step >= before:
            continue
        try:
            return step, read(step), damaged
        except DamagedError as error:
            damaged[step] = error
    if not damaged:
        return None
    _, newest = next(iter(damaged.items()))
    if len(damaged) == 1:
        raise newest
    raise CheckpointError(
        f"all {len(damaged)} checkpoints of the run are damaged; the newest: {newest}"
    )
