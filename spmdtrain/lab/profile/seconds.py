"""Sums up the trace of a step: seconds by sort of work, by part, and the longest instructions.

All are means over the devices. They add up to the time from the first instruction on any device to
the last; time without work is `idle`. Communication includes the wait for other devices.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmdtrain.compiled.operations import ELEMENTWISE, KindOfWork
from spmdtrain.compiled.step_parts import OTHER
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import OPERATIONS, PROFILE, SECONDS, RunFiles
from spmdtrain.lab.profile.trace import Executed, read_trace, shared_time
from spmdtrain.running.report.json_lines import write_document

IDLE = "idle"
MOST = 12  # instructions that are listed
UNKNOWN = KindOfWork(ELEMENTWISE, OTHER, "")


@dataclass(frozen=True)
class Longest:
    """A long instruction: its `seconds` within the step, and how many `times` a device ran it."""

    name: str
    sort: str
    part: str
    path: str
    seconds: float
    times: float


@dataclass(frozen=True)
class StepProfile:
    """The seconds of a step on `devices` devices: `sorts` and `parts` each add up to `seconds`."""

    step: int
    devices: int
    seconds: float
    sorts: Mapping[str, float]
    parts: Mapping[str, float]
    longest: Sequence[Longest]

    def document(self) -> dict[str, Any]:
        """Returns the profile as JSON values."""
        return asdict(self)


def traced_steps(run: Path) -> list[int]:
    """Returns the traced steps of a run, in order."""
    names = [path.name.removeprefix("step") for path in (run / PROFILE).glob("step*")]
    return sorted(int(name) for name in names if name.isdecimal())


def profile_of(run: Path, step: int) -> StepProfile:
    """Returns the profile of a traced step, and stores it next to the trace for the report.

    Raises CheckpointError if the step has no trace.
    """
    folder = run / PROFILE / f"step{step}"
    devices = read_trace(folder)
    known = RunFiles(folder).document(OPERATIONS) if (folder / OPERATIONS).exists() else {}
    if not isinstance(known, dict):
        raise CheckpointError(f"{folder / OPERATIONS} is not what a run writes", fix="--steps 3")
    operations = {name: _operation(values) for name, values in known.items()}
    profile = sum_up(step, devices, operations)
    write_document(folder / SECONDS, profile.document())
    return profile


def _operation(values: Any) -> KindOfWork:
    match values:
        case [str(sort), str(part), str(path)]:
            return KindOfWork(sort, part, path)
    return UNKNOWN


def sum_up(
    step: int, devices: Mapping[str, Sequence[Executed]], known: Mapping[str, KindOfWork]
) -> StepProfile:
    """Returns the profile of what the devices ran. `known` has the instructions that do work.

    An instruction that is not in it comes from a program whose text was not stored, and counts as
    elementwise work of no part.
    """
    took: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for ran in devices.values():
        working = [executed for executed in ran if executed.name in known or not known]
        for name, nanoseconds in shared_time(working).items():
            took[name] += nanoseconds
        times.update(executed.name for executed in working)
    every = [executed for ran in devices.values() for executed in ran]
    whole = max(executed.end for executed in every) - min(executed.begin for executed in every)
    count = len(devices)
    seconds = {name: nanoseconds / count / 1e9 for name, nanoseconds in took.items()}
    sorts: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    for name, share in seconds.items():
        sorts[known.get(name, UNKNOWN).sort] += share
        parts[known.get(name, UNKNOWN).part] += share
    idle = max(whole / 1e9 - sum(seconds.values()), 0.0)
    largest = list(_largest_first(seconds).items())[:MOST]
    longest = [
        Longest(name, *known.get(name, UNKNOWN), seconds=share, times=times[name] / count)
        for name, share in largest
    ]
    return StepProfile(
        step,
        count,
        whole / 1e9,
        _largest_first(sorts) | {IDLE: idle},
        _largest_first(parts) | {IDLE: idle},
        longest,
    )


def _largest_first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
