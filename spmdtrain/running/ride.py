"""The hooks that riders (riders.py) put between the steps of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.running.device_batches import Saw
from spmdtrain.running.report.reporter import Hook
from spmdtrain.train.batch import Batch
from spmdtrain.train.state import TrainState


@dataclass(frozen=True)
class Ride:
    """The hooks of one rider from one detour of the run to the next; each may be left out.

    `saw(step, rows)` is given the rows of each batch as this process makes them, in the thread that
    does. `after_step(step, batch, state)` is called once the step has been dispatched, and
    `before_save(step, state, on_disk)` before a state is copied to the disk or into memory. `hook`
    is called like that of a caller. `finish()` waits for what is under way, before the run reports
    its end or goes elsewhere.
    """

    saw: Saw | None = None
    after_step: Callable[[int, Batch, TrainState], None] | None = None
    before_save: Callable[[int, TrainState, bool], None] | None = None
    hook: Hook | None = None
    finish: Callable[[], None] | None = None


def called(rides: Sequence[Ride], name: str) -> list[Callable[..., Any]]:
    """Returns the hooks of this name, in the order of the riders."""
    return [hook for ride in rides if (hook := getattr(ride, name)) is not None]
