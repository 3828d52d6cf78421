"""`spmdtrain replay`: repeats steps of a run, and reports the first difference, if any."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.run.waiting import waiting
from spmdtrain.cli.shared_arguments import add_devices, add_make, add_own, add_set, positive_int
from spmdtrain.config import DONE, UNEQUAL
from spmdtrain.config.settable import OF_REPLAY
from spmdtrain.lab.replay.starts import flags_of, read_start

if TYPE_CHECKING:
    from spmdtrain.lab.replay.replay import Replayed


def add_replay(commands) -> None:
    """Adds the command `replay` and its arguments."""
    replay = commands.add_parser(
        "replay", help="repeat steps of a run: bit-equal, or what differs first"
    )
    replay.add_argument("run", metavar="RUN", help="run directory, or a bundle in it")
    replay.add_argument(
        "--step",
        type=positive_int,
        metavar="N",
        help="the step in question; the replay starts at the checkpoint before it (default: the "
        "bad step of a bundle)",
    )
    replay.add_argument(
        "--to", type=positive_int, metavar="M", help="continue up to step M (default: N)"
    )
    add_make(replay)
    add_own(replay)
    add_set(
        replay,
        "e.g. mesh.tensor=2: on another mesh, the steps are equal except for rounding",
        OF_REPLAY,
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    add_devices(replay)
    replay.set_defaults(command=run_replay)


def run_replay(parsed: argparse.Namespace) -> int:
    """Prints whether the repeated steps equal those that the run recorded.

    Returns UNEQUAL if not.
    """
    take_flags(Path(parsed.run), parsed.step or 1)
    with waiting(parsed, f"replaying {parsed.run}"):
        from spmdtrain.lab.replay.replay import replay

        replayed = replay(
            parsed.run,
            parsed.step,
            to=parsed.to,
            overrides=parsed.set,
            make=parsed.make,
            own=parsed.own,
        )
    print(json.dumps(replayed.document()) if parsed.json else describe(replayed))
    return DONE if replayed.equal else UNEQUAL


def take_flags(run: Path, step: int) -> None:
    """Sets XLA_FLAGS to those recorded for `step`, unless they are set; XLA reads them once.

    A step that was computed on CPUs is repeated on CPUs. If other flags are set, a line says so.
    """
    start = read_start(run, step)
    if start is None:
        return
    if start.get("platform") == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    recorded = flags_of(start)
    typed = os.environ.get("XLA_FLAGS")
    if typed is None:
        if recorded:
            os.environ["XLA_FLAGS"] = recorded
    elif sorted(typed.split()) != sorted(recorded.split()):
        what = f"XLA_FLAGS are not those of the run, which had {recorded!r}: bits may differ"
        print(f"spmdtrain: {what}", file=sys.stderr)


def describe(replayed: "Replayed") -> str:
    """Describes the verdict of a replay, in one or two lines."""
    count = replayed.last - replayed.start
    first, last = replayed.samples
    steps = "1 step" if count == 1 else f"{count} steps"
    where = f"checkpoint {replayed.start}" if replayed.start else "the start"
    lines = [f"from {where}, {steps} again, samples {first} to {last}"]
    if replayed.elsewhere:
        apart = f"{replayed.apart:.1e} apart at most; rounding moves them by {replayed.limit:.1e}"
        verdict = "within rounding" if replayed.equal else "beyond rounding"
        lines.append(f"on another mesh: {verdict}: figures {apart}")
    elif replayed.equal:
        lines.append("every figure equal to the bit")
    for step, (equal, of) in replayed.leaves.items():
        lines.append(f"after step {step} {equal} of {of} leaves equal")
    if replayed.first is not None:
        lines.append(replayed.first.describe())
    if replayed.twice is not None:
        lines.append(_meaning(replayed.twice))
    return "\n".join(lines)


def _meaning(twice: bool) -> str:
    if twice:
        return (
            "the replay is the same each time: the run computed or stored something else, or runs "
            "other code than this"
        )
    return "two replays differ from each other: this machine does not compute the same twice"
