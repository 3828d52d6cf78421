"""Decides when the next checkpoint is due."""

import statistics
from collections.abc import Sequence
from typing import Literal

from spmdtrain.processes.processes import of_process_0

FIRST_AUTO = 10  # steps until the first save, from which `auto` measures the cost of one


class SaveInterval:
    """The interval between saves. `every` is `checkpoint.every`; the run starts at `first`.

    A number means its multiples; 0 means never. "auto" means the interval that loses the least time
    to saves and to work redone after failures (intervals.py), given the measured times of steps and
    saves.
    """

    def __init__(self, every: int | Literal["auto"], first: int, devices: int):
        self._auto = every == "auto"
        self._devices = devices
        self._saved = first
        self.every = FIRST_AUTO if every == "auto" else every

    def is_due(self, step: int) -> bool:
        """Returns True if the run must save after `step`."""
        if self._auto:
            return step - self._saved >= self.every
        return bool(self.every) and step % self.every == 0

    def saved(self, step: int, stopped: float, step_seconds: Sequence[float]) -> bool:
        """Learns from a save that stopped training for `stopped` seconds.

        `step_seconds` are those of the steps so far. Process 0 decides for all. Returns True if the
        interval has changed.
        """
        self._saved = step
        taken = step_seconds[1:]  # the first step is not typical
        if not self._auto or not taken:
            return False
        from spmdtrain.checkpoints.intervals import plan_checkpoints

        plan = plan_checkpoints(statistics.median(taken), stopped, self._devices)
        before = self.every
        self.every = of_process_0(plan.every)
        return self.every != before
