"""`spmdtrain profile`: prints where the seconds of a step go."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.record.replay import take_flags
from spmdtrain.cli.run.waiting import waiting
from spmdtrain.cli.shared_arguments import add_devices, add_make, add_own, positive_int
from spmdtrain.config import DONE, CheckpointError

if TYPE_CHECKING:
    from spmdtrain.lab.profile.seconds import StepProfile

LONGEST_PATH = 70  # characters of jax's path to an instruction
NEWEST = 2**31 - 1


def add_profile(commands) -> None:
    """Adds the command `profile` and its arguments."""
    profile = commands.add_parser(
        "profile", help="say where the seconds of a step go, by sort of work and part of the model"
    )
    profile.add_argument("run", metavar="RUN", help="run directory")
    profile.add_argument(
        "--steps",
        type=positive_int,
        metavar="N",
        help="repeat steps of the run and trace N of them (default: read what log.profile has "
        "traced)",
    )
    add_make(profile)
    add_own(profile)
    profile.add_argument("--json", action="store_true", help="print JSON")
    add_devices(profile)
    profile.set_defaults(command=run_profile)


def run_profile(parsed: argparse.Namespace) -> int:
    """Prints where the seconds of the traced steps go."""
    run = Path(parsed.run)
    if parsed.steps:
        take_flags(run, NEWEST)
    with waiting(parsed, f"profiling {run}"):
        from spmdtrain.lab.profile.seconds import profile_of, traced_steps
        from spmdtrain.lab.profile.take import trace_steps

        steps = traced_steps(run)
        if parsed.steps:
            steps = trace_steps(run, parsed.steps, make=parsed.make, own=parsed.own)
        if not steps:
            what = f"{run} has no traced step"
            raise CheckpointError(what, fix="--steps 3, which takes some again")
        profiles = [profile_of(run, step) for step in steps]
    slower = _slower(run)
    if parsed.json:
        steps = [profile.document() for profile in profiles]
        print(json.dumps({"steps": steps, "slower": slower}))
        return DONE
    lines = [*describe(middle_of(profiles)), *_others(profiles), *_alarm_lines(slower)]
    print("\n".join(lines))
    return DONE


def middle_of(profiles: list["StepProfile"]) -> "StepProfile":
    """Returns the step of median length, which ignores a step that was disturbed."""
    return sorted(profiles, key=lambda profile: profile.seconds)[len(profiles) // 2]


def describe(profile: "StepProfile") -> list[str]:
    """Describes a profile: sorts of work, parts, and the longest instructions."""
    from spmdtrain.lab.page.formats import plural, seconds, share

    def table(title: str, rows: Mapping[str, float]) -> list[str]:
        order = sorted(rows.items(), key=lambda row: -row[1])
        return [title] + [
            f"  {name:15}{seconds(took):>10}{share(took, profile.seconds):>6}"
            for name, took in order
        ]

    lines = [
        f"step {profile.step}: {seconds(profile.seconds)}, the mean over "
        f"{plural(profile.devices, 'device')}",
        *table("by sort of work", profile.sorts),
        *table("by part", profile.parts),
        *_nameless(profile.parts),
        "longest instructions",
    ]
    for work in profile.longest:
        path = work.path
        if len(path) > LONGEST_PATH:
            path = f"...{path[3 - LONGEST_PATH :]}"
        times = f"{work.times:g} times"
        lines.append(
            f"  {seconds(work.seconds):>10}{share(work.seconds, profile.seconds):>6}  {work.part} "
            f"{work.sort}, {times}: {work.name}  {path}"
        )
    return lines


def _nameless(parts: Mapping[str, float]) -> list[str]:
    """Returns a line if no instruction names its part, as in a program of an older version."""
    from spmdtrain.compiled.step_parts import OTHER
    from spmdtrain.lab.profile.seconds import IDLE

    if set(parts) - {OTHER, IDLE}:
        return []
    return [
        "no instruction names its part: jax's cache has this program from an older version; "
        "JAX_COMPILATION_CACHE_DIR=FOLDER, an empty one, before the command compiles it anew"
    ]


def _others(profiles: list["StepProfile"]) -> list[str]:
    from spmdtrain.lab.page.formats import seconds

    if len(profiles) == 1:
        return []
    lengths = ", ".join(f"step {profile.step} {seconds(profile.seconds)}" for profile in profiles)
    return [f"of {len(profiles)} traced steps, the one of middle length: {lengths}"]


def _slower(run: Path) -> dict[str, Any] | None:
    """Returns the alarm about a step time outside the run's usual range; None if there is none.

    Its component is the one that a trace blames.
    """
    from spmdtrain.lab.page.cost.alarm import alarm
    from spmdtrain.lab.page.cost.waterfall import farthest_bound
    from spmdtrain.lab.page.read import RunReader

    read = RunReader(run).read()
    raised = alarm(read)
    if raised is None:
        return None
    bound = farthest_bound(read) if raised.component == "step" else None
    return raised._asdict() | {"component": bound or raised.component}


def _alarm_lines(slower: Mapping[str, Any] | None) -> list[str]:
    if slower is None:
        return []
    unit = "s a step" if slower["predicted"] is None else "times the predicted time"
    return [
        f"slower from step {slower['first']} on: {slower['ratio']:.3g} {unit}, before it was "
        f"{slower['usual']:.3g}; the component: {slower['component']}"
    ]
