"""Finds the memory that processes of this host can use, for devices that are its processors."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# Limits of the control group of a container or a scheduler: version 2, then 1.
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# For each limit, the file that says how much of it is in use.
USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def host_bytes() -> int | None:
    """Returns the bytes of memory and swap, or the limit of the control group if that is less.

    This is the total, not what is free: a step that needs more cannot run here, even after
    everything else has ended. None if the system does not tell.
    """
    sizes = (_memory("MemTotal", "SwapTotal"), *map(_limit, LIMITS))
    known = [size for size in sizes if size]
    return min(known, default=None)


def available_bytes() -> int | None:
    """Returns the bytes of memory, without swap, that a program could take now.

    None if the system does not tell.
    """
    sizes = [_memory("MemAvailable"), *map(_left, LIMITS)]
    return min((size for size in sizes if size is not None), default=None)


def _memory(*names: str) -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    try:
        return 1024 * sum(int(sizes[name].split()[0]) for name in names)
    except (KeyError, ValueError, IndexError):
        return None


def _left(path: Path) -> int | None:
    """Returns what a control group may still take: the cache of files gives way."""
    limit, used = _limit(path), _limit(path.with_name(USED[path.name]))
    if limit is None or used is None:
        return None
    try:
        words = path.with_name("memory.stat").read_text(encoding="utf-8").split()
        cached = int(words[words.index("inactive_file") + 1])
    except (OSError, ValueError, IndexError):
        cached = 0
    return max(limit - used + cached, 0)


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max" is no limit
        return None
