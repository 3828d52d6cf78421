"""Finds the memory that processes of this host can use, for devices that are its processors."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# Limits of the control group of a container or a scheduler: version 2, then 1.
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_bytes() -> int | None:
    """Returns the bytes of memory and swap, or the limit of the control group if that is less.

    This is the total, not what is free: a step that needs more cannot run here, even after
    everything else has ended. None if the system does not tell.
    """
    found = [limit for limit in (_memory(), *map(_limit, LIMITS)) if limit]
    return min(found, default=None)


def _memory() -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    try:
        return 1024 * sum(int(sizes[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    except (KeyError, ValueError, IndexError):
        return None


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max" is no limit
        return None
