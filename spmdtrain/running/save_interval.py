"""Decides when the next checkpoint is due."""

import statistics
from collections.abc import Sequence
from typing import Literal

from spmdtrain.checkpoints.intervals import plan_checkpoints
from spmdtrain.processes.processes import of_process_0

FIRST_AUTO = 10  # steps until the first save, by which `auto` measures what one costs


class SaveInterval:
    """Says after which steps to save. `every` is `checkpoint.every`; the run goes on from `first`.

    A number means its multiples, 0 never. "auto" means the interval that loses least time to saves
    and to work that a failure undoes (checkpoint_interval.py), by the steps and the saves that were
    measured.
    """

    def __init__(self, every: int | Literal["auto"], first: int, devices: int):
        self._auto = every == "auto"
        self._devices = devices
        self._saved = first
        self.every = FIRST_AUTO if every == "auto" else every

    def is_due(self, step: int) -> bool:
        """True if the run is to save after `step`."""
        if self._auto:
            return step - self._saved >= self.every
        return bool(self.every) and step % self.every == 0

    def saved(self, step: int, stopped: float, step_seconds: Sequence[float]) -> bool:
        """Learns from a save that stopped training for `stopped` seconds.

        `step_seconds`: of the steps so far. Process 0 decides for all. Returns whether the interval
        is another one now.
        """
        self._saved = step
        taken = step_seconds[1:]  # the first one is no step like the others
        if not self._auto or not taken:
            return False
        plan = plan_checkpoints(statistics.median(taken), stopped, self._devices)
        before = self.every
        self.every = of_process_0(plan.every)
        return self.every != before
