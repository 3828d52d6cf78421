"""Records when this process began, by the wall clock."""

import time
from pathlib import Path

TICKS_A_SECOND = 100  # USER_HZ, the same on every Linux that runs Python

_program_began: float | None = None


def program_begins() -> None:
    """Notes that this process is a command: its run was launched when the process began."""
    global _program_began
    _program_began = process_start()


def launched() -> float:
    """Returns when the run that begins now was launched, in seconds since the epoch.

    The first run of a command was launched when its process began, before any import; a run that is
    called from a program is launched now.
    """
    global _program_began
    began, _program_began = _program_began, None
    return time.time() if began is None else began


def process_start() -> float:
    """Returns when this process began, to a hundredth of a second; the present time if the kernel
    does not say.
    """
    now = time.time()
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return now
    ticks = int(stat.rpartition(")")[2].split()[19])  # field 22; the name may hold spaces
    return now - max(since_boot - ticks / TICKS_A_SECOND, 0.0)
