"""Writes the first and the last event of an attempt, `launched` and `ended`, to RUN/events.jsonl.

An attempt is one process's work on a run, from its launch to its end. Both events are written by
process 0 as soon as it holds the run directory, whatever happens in between: an error before the
first step, or a signal while the step compiles. Only a process that is killed leaves no `ended`.
"""

import contextlib
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.errors import UserError
from spmdtrain.config.named_code import own_errors_named
from spmdtrain.config.run_files import EVENTS, METRICS, newest_line, newest_step
from spmdtrain.processes import pulse, signals
from spmdtrain.running.report.json_lines import JsonLines

FAILED = 1  # how Python ends a program after an error that nobody caught
INTERRUPTED = 130


class Attempt:
    """The attempt of this process. `exit_code` is the code it ends with if there is no error."""

    def __init__(self, events: JsonLines | None):
        self.exit_code = 0
        self._events = events

    def end(self, code: int, error: BaseException | None = None) -> None:
        """Writes `ended`: at which step, in which phase, with which exit code, and why; once."""
        events, self._events = self._events, None
        if events is None:
            return
        name, step, _ = pulse.phase()
        why = {} if error is None else {"why": _why(error)}
        end = {"event": "ended", "step": step, "phase": name, "exit_code": code, **why}
        events.write(time=time.time(), **end)


@contextlib.contextmanager
def attempt(directory: Path, launched: float) -> Iterator[Attempt]:
    """Writes `launched` (at that time) into the events of a run, and at its end `ended`.

    Raises StorageError if they cannot be written.
    """
    if jax.process_index() > 0:
        yield Attempt(None)
        return
    events = JsonLines(directory / EVENTS)
    with contextlib.closing(events):
        step = newest_step(directory) or 0
        events.write(time=launched, event="launched", step=step, **_launch(directory))
        this = Attempt(events)
        with signals.noted(this.end):
            try:
                with own_errors_named():
                    yield this
            except BaseException as error:
                # A full disk refuses this line too; the error that ended the run is the one to
                # report.
                with contextlib.suppress(UserError):
                    this.end(_code_of(error), error)
                raise
            this.end(this.exit_code)


def _launch(directory: Path) -> dict[str, Any]:
    """Returns how this process was started, and how far the previous attempt had got."""
    devices = jax.devices()
    launch: dict[str, Any] = {
        "argv": sys.argv,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processes": jax.process_count(),
        "devices": {"kind": devices[0].device_kind, "count": len(devices)},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("spmdtrain", "jax", "jaxlib")},
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    # Lines of steps after the checkpoint are dropped, and with them the time of the last one.
    before = newest_line(directory / METRICS)
    if before:
        launch["before"] = {name: before.get(name) for name in ("step", "time")}
    return launch


def _why(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else type(error).__name__


def _code_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
