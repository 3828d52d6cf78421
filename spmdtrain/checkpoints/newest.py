"""Finds the checkpoint from which a run resumes: the newest intact one.

A newer, damaged one is set aside, not deleted, and the run repeats its steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.meta import Meta
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config.errors import CheckpointError, DamagedError
from spmdtrain.train.state import TrainState

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedState:
    """A checkpoint that was read, or a snapshot if it is `from_memory`.

    `damaged`: why each newer step was not read, newest first.
    """

    step: int
    state: TrainState
    meta: Meta
    damaged: dict[int, DamagedError] = field(default_factory=dict)
    from_memory: bool = False


def newest_good(
    checkpoints: Checkpoints, abstract: TrainState, before: int | None = None
) -> LoadedState | None:
    """Reads the newest intact state; see `read_newest`.

    Raises CheckpointError if it does not fit `abstract`.
    """
    newest = read_newest(checkpoints, lambda step: checkpoints.restore(step, abstract), before)
    if newest is None:
        return None
    step, (state, meta), damaged = newest
    return LoadedState(step, state, meta, damaged)


def read_newest(
    checkpoints: SavedSteps, read: Callable[[int], T], before: int | None = None
) -> tuple[int, T, dict[int, DamagedError]] | None:
    """Calls `read(step)` for the newest checkpoint, then for older ones as long as it finds damage.

    Returns the step, what was read, and why each newer step could not be read, newest first; None
    if there is no checkpoint at all. Changes nothing. With `before`, only earlier steps are
    considered. Raises CheckpointError if every checkpoint is damaged: a run never restarts from
    scratch on its own.
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
