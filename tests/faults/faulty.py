"""`spmdtrain train` with a fault in one of its processes.

python -m faults.faulty FAULT RANK train ...     FAULT: one of FAULTS; RANK: the process, from 0

It writes the moment of the fault (monotonic seconds) into the file `hit` of its working directory.
"""

import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

AT = 5  # the step after which it happens
SLOW_STEP = 1.0  # seconds
SLOW_COMMIT = 2.0


def kill_coordinator() -> None:
    """It is a child of process 0, and goes by the name of its file."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [pid] = [
        int(pid) for pid in listed if "coordinator.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(pid, signal.SIGKILL)


def stop(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def raise_error() -> None:
    raise RuntimeError("a fault of the battery")


FAULTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "SIGKILL": stop(signal.SIGKILL),
    "SIGSTOP": stop(signal.SIGSTOP),
    "coordinator": kill_coordinator,
    "exception": raise_error,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit 0": lambda: os._exit(0),
    "sleep": lambda: time.sleep(1000),
    "held lock": lambda: re.match("(a*)*b", "a" * 40),  # in C, and it does not give the GIL back
    "slow step": lambda: time.sleep(SLOW_STEP),
}


def slow_commits() -> None:
    """Saves take longer, between the last file and the rename."""
    from orbax.checkpoint._src.checkpointers import async_checkpointer

    commit = async_checkpointer._on_commit_callback

    def slowly(*given: Any, **named: Any) -> None:
        time.sleep(SLOW_COMMIT)
        commit(*given, **named)

    async_checkpointer._on_commit_callback = slowly


def compile_slowly() -> None:
    """Compiling takes a while in C, and the file `hit` says when it has begun."""
    from spmdtrain.running.start import compiling

    compile_step = compiling.compile_step

    def slowly(*given: Any) -> Any:
        Path("hit").write_text(str(time.monotonic()))
        subprocess.run(["sleep", "2"], check=True)
        return compile_step(*given)

    compiling.compile_step = slowly


def main(fault: str, rank: int, arguments: list[str]) -> int:
    from spmdtrain.cli import main as cli
    from spmdtrain.running import loop

    own = 0
    if "--process" in arguments:
        own = int(arguments[arguments.index("--process") + 1])
    if fault == "slow save":
        slow_commits()
    elif fault == "compile":
        compile_slowly()
    elif own == rank:

        def hook(event: str, step: int, _: Any) -> None:
            if event == "step" and (step == AT or (fault == "slow step" and step > AT)):
                Path("hit").write_text(str(time.monotonic()))
                FAULTS[fault]()

        loop.run = functools.partial(loop.run, hooks=[hook])
    return cli(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
