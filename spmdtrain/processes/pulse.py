"""Reports the phase and the step of a process to the launcher that watches it.

`spmdtrain launch` starts a process with the write end of a pipe, whose file descriptor is in the
environment. Each message is a line "PHASE STEP". A process without a launcher writes nothing.
Writing never blocks: if the pipe is full, the message is dropped.

People read a run in its events and lines (`Reporter`), which process 0 writes once and keeps. The
pulse is for a program, which must hear each process, even one that hangs before it has a reporter,
and forgets what it heard. It is therefore not a destination of the reporter.
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple

from spmdtrain.processes import signals

PIPE = "SPMDTRAIN_PULSE"  # environment variable with the number of the file descriptor

# The phases of a process, in order. A process starts in `begin`.
BEGIN = "begin"  # imports, devices, joining the other processes
RESTORE = "restore"  # the state is read or initialised
COMPILE = "compile"
FIRST_STEP = "first_step"
STEP = "step"
SAVE = "save"
EVALUATE = "evaluate"
END = "end"  # the last save is written
PHASES = (BEGIN, RESTORE, COMPILE, FIRST_STEP, STEP, SAVE, EVALUATE, END)

# News rather than phases:
SAVED = "saved"  # the checkpoint of the step is complete on disk
HELD = "held"  # a snapshot of the step is whole in the launcher's memory
DONE = "done"  # the run has ended normally
UNDONE = "undone"  # the steps after this one will be repeated


class Moment(NamedTuple):
    """A process's phase and step, and the wall time at which the phase began."""

    name: str
    step: int
    since: float

    @property
    def seconds(self) -> float:
        return max(time.time() - self.since, 0.0)


_pipe: int | None = None
_phase = Moment(BEGIN, 0, time.time())


def begin() -> None:
    """Takes the launcher's pipe, if there is one, and prints all stacks on SIGUSR1 from now on."""
    global _pipe
    descriptor = os.environ.pop(PIPE, "")
    if not descriptor.isdecimal():
        return
    pipe = int(descriptor[:9])
    try:
        os.set_blocking(pipe, False)
        os.set_inheritable(pipe, False)
    except OSError:  # inherited from a launcher that is not ours
        return
    _pipe = pipe
    signals.launched()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # written in C: needs no free GIL


def is_watched() -> bool:
    """Returns True if a launcher watches this process."""
    return _pipe is not None


def phase() -> Moment:
    """Returns the phase that this process is in."""
    return _phase


def tell(what: str, step: int = 0) -> None:
    """Reports that this process enters a phase at `step`, or a piece of news."""
    global _phase
    if what in PHASES:
        since = _phase.since if what == _phase.name else time.time()
        _phase = Moment(what, step, since)
    if _pipe is not None:
        with suppress(OSError):  # full, or the launcher is gone
            os.write(_pipe, f"{what} {step}\n".encode())


def parse(line: str) -> tuple[str, int] | None:
    """Parses a line into (what, step).

    None if it is malformed, e.g. cut short when its writer was killed.
    """
    what, _, step = line.partition(" ")
    if what not in (*PHASES, SAVED, HELD, DONE, UNDONE) or not step.isdecimal():
        return None
    return what, int(step)
