"""Reads the trace of a step: which instruction each device ran when."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from spmdtrain.config.errors import CheckpointError

TRACES = "plugins/profile/*/*.xplane.pb"
# Lines that summarise the lines of a device's streams.
SUMS = ("XLA Modules", "XLA TraceMe", "Steps", "Framework Ops", "Framework Name Scope", "Source")


class Executed(NamedTuple):
    """One instruction that a device ran, from `begin` to `end`, in nanoseconds."""

    name: str
    begin: float
    end: float


def read_trace(folder: Path) -> dict[str, list[Executed]]:
    """Returns what each device ran of the program that took longest, in RUN/profile/stepN.

    Raises CheckpointError if there is no trace, or if it holds no instruction of a program.
    """
    files = sorted(folder.glob(TRACES))
    newest = [each for each in files if each.parent == files[-1].parent]
    programs: dict[str, dict[str, list[Executed]]] = defaultdict(lambda: defaultdict(list))
    for file in newest:
        for program, device, ran in _events(file):
            programs[program][f"{file.stem} {device}"].append(ran)
    if not programs:
        found = f"{len(newest)} files of a profiler"
        fix = "another step of log.profile, or --steps 3"
        raise CheckpointError(f"{folder} holds no trace of a step", found=found, fix=fix)
    return dict(max(programs.values(), key=lambda each: _nanoseconds(each.values())))


def _events(file: Path) -> Iterator[tuple[str, str, Executed]]:
    """Yields (program, device, instruction). On a CPU all devices share the lines of threads."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            if line.name in SUMS:
                continue
            for event in line.events:
                told = dict(event.stats)
                if "hlo_op" not in told or not event.duration_ns:
                    continue
                device = f"{plane.name} {told.get('device_ordinal', '')}"
                end = event.start_ns + event.duration_ns
                ran = Executed(str(told["hlo_op"]), event.start_ns, end)
                yield str(told.get("hlo_module", "")), device, ran


def _nanoseconds(devices: Iterable[list[Executed]]) -> float:
    return sum(each.end - each.begin for ran in devices for each in ran)


def shared_time(ran: Iterable[Executed]) -> dict[str, float]:
    """Returns nanoseconds by instruction, so that they add up to the time in which any ran.

    Instructions that run at once share that time in equal parts.
    """
    edges = sorted(
        edge for each in ran for edge in ((each.begin, 1, each.name), (each.end, -1, each.name))
    )
    running: Counter[str] = Counter()
    took: dict[str, float] = defaultdict(float)
    last = 0.0
    for at, change, name in edges:
        count = sum(running.values())
        if count and at > last:
            for each, times in running.items():
                took[each] += (at - last) * times / count
        last = at
        running[name] += change
        if not running[name]:
            del running[name]
    return took
