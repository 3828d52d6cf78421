"""Accounts for the time of a run, over all its attempts.

Every moment belongs to one class, so the classes sum to the wall time. Only `step` is training that
counts. Steps undone by a failure move from `step` to `repeated` as soon as the checkpoint from
which the run continues is known. Steps in a snapshot that the launcher holds are not undone, unless
the run continues from an earlier step, or not at all.
"""

import time
from collections.abc import Callable
from typing import TypedDict

from spmdtrain.processes import pulse

DOWN = "down"  # from the end of an attempt to the start of the next
HANG = "hang"  # from the last message of a hanging process to its end
REPEATED = "repeated"
CLASSES = (*pulse.PHASES, REPEATED, HANG, DOWN)


class Report(TypedDict):
    """The time of a run by class, and the share of it that was training."""

    wall_seconds: float
    goodput: float  # the share of the wall time that counts
    seconds: dict[str, float]  # by class


class Goodput:
    """An account of seconds by class. `enter` ends one stretch of time and begins the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._begin = now()
        self._since = self._begin
        self._class = DOWN
        self._step = 0
        self._held = 0  # the newest step of which there is a snapshot
        self._unsaved: list[tuple[int, float]] = []  # (step, its seconds), not yet on disk
        self.seconds: dict[str, float] = dict.fromkeys(CLASSES, 0.0)

    def enter(self, what: str, step: int = 0) -> None:
        """Counts the time from now on as class `what`."""
        self._close(self._now())
        self._class = what
        self._step = step

    def heard(self, what: str, step: int = 0) -> None:
        """Handles a message of a process (pulse.py): the phase that it enters, or its news."""
        if what == pulse.UNDONE:
            self.undone(step)
        elif what == pulse.SAVED:
            self.saved(step)
        elif what == pulse.HELD:
            self._held = step
        elif what in pulse.PHASES:
            self.enter(what, step)

    def saved(self, step: int) -> None:
        """Notes that all steps up to this one are on disk: no failure undoes them."""
        self._unsaved = [entry for entry in self._unsaved if entry[0] > step]

    def failed(self, hung: bool = False) -> None:
        """Notes that an attempt failed: its steps that are neither saved nor in memory repeat."""
        if hung:
            self._class = HANG
        self.enter(DOWN)
        self.undone(self._held)

    def over(self) -> None:
        """Notes that a failed attempt was the last: steps that were only in memory are lost."""
        self.undone(0)

    def undone(self, after: int) -> None:
        """Notes that the steps after this one are repeated, except those on disk."""
        self._held = min(self._held, after)
        undone = sum(seconds for step, seconds in self._unsaved if step > after)
        self._unsaved = [entry for entry in self._unsaved if entry[0] <= after]
        self.seconds[pulse.STEP] -= undone
        self.seconds[REPEATED] += undone

    def report(self) -> Report:
        """Returns the account of the time until now."""
        now = self._now()
        self._close(now)
        wall = now - self._begin
        share = self.seconds[pulse.STEP] / wall if wall else 0.0
        return {"wall_seconds": wall, "goodput": share, "seconds": dict(self.seconds)}

    def _close(self, now: float) -> None:
        seconds = now - self._since
        self._since = now
        self.seconds[self._class] += seconds
        if self._class == pulse.STEP:
            self._unsaved.append((self._step, seconds))
