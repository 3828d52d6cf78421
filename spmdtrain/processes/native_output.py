"""Keeps remarks of native libraries out of a command's output.

Gloo, which joins processes on CPUs, prints a line to standard output for each group of devices
that it connects, at any time, and no setting prevents it. Such a line would end up in a log, or in
the JSON that a command prints. The output of other libraries (NCCL_DEBUG) passes.
"""

import contextlib
import os
import re
import sys
import threading

STANDARD_OUTPUT = 1
# Threads may print into each other's lines.
REMARKS = re.compile(rb"\[Gloo\] Rank |connected peer ranks is")


def drop_remarks() -> None:
    """Filters the output of native code from here on. Python's output bypasses the filter."""
    sys.stdout.flush()
    direct = os.dup(STANDARD_OUTPUT)
    printed, into = os.pipe()
    os.dup2(into, STANDARD_OUTPUT)
    os.close(into)
    before = sys.stdout
    sys.stdout = open(  # noqa: SIM115  it stays open
        direct,
        "w",
        encoding=before.encoding,
        errors=before.errors,
        buffering=1 if before.line_buffering else -1,
    )
    threading.Thread(target=_forward, args=(printed, direct), daemon=True).start()


def _forward(printed: int, direct: int) -> None:
    with open(printed, "rb") as lines:
        for line in lines:
            if not REMARKS.search(line):
                with contextlib.suppress(OSError):  # nobody reads the output any more
                    os.write(direct, line)
