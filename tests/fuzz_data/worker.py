"""Examines cases one after the other, each within a time limit: a process that may die of one.

It is told the seeds, or one case as JSON, and says a JSON line before each case and one after it.
"""

import functools
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path

from fuzz_data.case import Case, draw
from fuzz_data.check import Outcome, examine
from spmdtrain.cli import command

SECONDS = 40.0  # that a case may take on a busy machine
MEMORY = 6 * 2**30  # bytes: a damaged number may ask for any amount
IN_MEMORY = "/dev/shm"  # where no file waits for a disk


class Hangs(BaseException):
    """A case takes longer than it may. No `except Exception` takes it for its own."""


def timed(case: Case, seconds: float = SECONDS) -> Outcome:
    """Examine a case in a folder of its own."""
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        room = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="fuzz-data-", dir=room) as folder:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return examine(case, Path(folder))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except Hangs:
        said = f"it does not end within {seconds:.0f} s\n{traceback.format_exc()}"
        return Outcome("found", said, "hangs")


def _interrupt(*_) -> None:
    raise Hangs


def work(cases: Iterable[Case]) -> None:
    """Say how each case ends."""
    for case in cases:
        _say({"begins": case.spoken()})
        begun = time.perf_counter()
        how, said, kind = timed(case)
        seconds = time.perf_counter() - begun
        _say({"how": how, "said": said, "kind": kind, "seconds": seconds, "format": case.format})


def _say(line: dict) -> None:
    sys.__stdout__.write(json.dumps(line) + "\n")
    sys.__stdout__.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    command.make_parser = functools.cache(command.make_parser)  # a quarter of the time otherwise
    if sys.argv[1] == "--case":
        work([Case(**json.loads(sys.argv[2]))])
    else:
        work(draw(seed) for seed in range(int(sys.argv[1]), int(sys.argv[2])))
