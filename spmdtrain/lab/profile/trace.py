"""Reads the trace of a step: the instructions of each device, and when they ran."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from spmdtrain.config.errors import CheckpointError

TRACES = "plugins/profile/*/*.xplane.pb"
# Lines of a trace that summarise others.
SUMS = ("XLA Modules", "XLA TraceMe", "Steps", "Framework Ops", "Framework Name Scope", "Source")


class Executed(NamedTuple):
    """One instruction that a device ran, from `begin` to `end`, in nanoseconds."""

    name: str
    begin: float
    end: float


def read_trace(folder: Path) -> dict[str, list[Executed]]:
    """Returns the instructions of each device, of the longest program in RUN/profile/stepN.

    Raises CheckpointError if there is no trace, or if it holds no instruction of a program.
    """
    files = sorted(folder.glob(TRACES))
    newest = [file for file in files if file.parent == files[-1].parent]
    programs: dict[str, dict[str, list[Executed]]] = defaultdict(lambda: defaultdict(list))
    for file in newest:
        for program, device, ran in _events(file):
            programs[program][f"{file.stem} {device}"].append(ran)
    if not programs:
        profiles = f"{len(newest)} files of a profiler"
        fix = "another step of log.profile, or --steps 3"
        raise CheckpointError(f"{folder} holds no trace of a step", found=profiles, fix=fix)
    return dict(max(programs.values(), key=lambda devices: _nanoseconds(devices.values())))


def _events(file: Path) -> Iterator[tuple[str, str, Executed]]:
    """Yields (program, device, instruction). On a CPU, devices share the lines of threads."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            if line.name in SUMS:
                continue
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats or not event.duration_ns:
                    continue
                device = f"{plane.name} {stats.get('device_ordinal', '')}"
                end = event.start_ns + event.duration_ns
                ran = Executed(str(stats["hlo_op"]), event.start_ns, end)
                yield str(stats.get("hlo_module", "")), device, ran


def _nanoseconds(devices: Iterable[list[Executed]]) -> float:
    return sum(executed.end - executed.begin for ran in devices for executed in ran)


def shared_time(ran: Iterable[Executed]) -> dict[str, float]:
    """Returns nanoseconds by instruction, which add up to the time in which any of them ran.

    Instructions that run at the same time share it equally.
    """
    edges = sorted(
        edge
        for executed in ran
        for edge in ((executed.begin, 1, executed.name), (executed.end, -1, executed.name))
    )
    running: Counter[str] = Counter()
    took: dict[str, float] = defaultdict(float)
    last = 0.0
    for at, change, name in edges:
        count = sum(running.values())
        if count and at > last:
            for instruction, times in running.items():
                took[instruction] += (at - last) * times / count
        last = at
        running[name] += change
        if not running[name]:
            del running[name]
    return took
