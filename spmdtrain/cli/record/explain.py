"""`spmdtrain explain`: why a step of a run stands out."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from spmdtrain.cli.record.replay import take_flags
from spmdtrain.cli.run.waiting import waiting
from spmdtrain.cli.shared_arguments import add_devices, add_make, add_own, positive_int
from spmdtrain.config import DONE, UNEQUAL

if TYPE_CHECKING:
    from spmdtrain.lab.replay.explain import Explained


def add_explain(commands) -> None:
    """Adds the command `explain` and its arguments."""
    explain = commands.add_parser(
        "explain", help="say why a step of a run stands out: data, rate, precision or machine"
    )
    explain.add_argument("run", metavar="RUN", help="run directory, or a bundle in it")
    explain.add_argument(
        "--step",
        type=positive_int,
        metavar="N",
        help="the step in question (default: the bad step of a bundle)",
    )
    add_make(explain)
    add_own(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")
    add_devices(explain)
    explain.set_defaults(command=run_explain)


def run_explain(parsed: argparse.Namespace) -> int:
    """Prints the likeliest cause. Returns UNEQUAL if a replay blames the machine."""
    take_flags(Path(parsed.run), parsed.step or 1)
    with waiting(parsed, f"replaying {parsed.run}"):
        from spmdtrain.lab.replay.explain import explain

        explained = explain(parsed.run, parsed.step, make=parsed.make, own=parsed.own)
    print(json.dumps(explained.document()) if parsed.json else describe(explained))
    return UNEQUAL if explained.cause == "machine" else DONE


def describe(explained: "Explained") -> str:
    """Describes the answer: how far the step stands out, each change, and the cause."""
    distance = "unknown: too few steps before it"
    if explained.seen is not None:
        distance = f"{explained.seen:.1f} deviations above the steps before it"
    lines = [f"step {explained.step}: {distance}"]
    lines += [
        f"{name}: {'unknown' if deviations is None else f'{deviations:.1f} deviations'}"
        for name, deviations in explained.without.items()
    ]
    if explained.first is not None:
        lines.append(explained.first.describe())
    if explained.samples:
        listed = ", ".join(f"{index}: {loss:.2f}" for index, loss in explained.samples[:8])
        lines.append(
            f"{len(explained.samples)} samples are far from the rest ({listed}; typical "
            f"{explained.typical:.2f})"
        )
        beginnings = zip(explained.samples[:4], explained.texts, strict=False)
        lines += [f"  sample {index}: {text}" for (index, _), text in beginnings]
    lines.append(meaning(explained).format(rate=explained.rate, usual=explained.usual))
    return "\n".join(lines)


def meaning(explained: "Explained") -> str:
    """Returns the text of the cause, with placeholders for `rate` and `usual`."""
    if explained.first is not None and explained.first.step > explained.step + 1:
        return (
            "cause: the machine. The figures of this step are equal to the bit, and the run's "
            "state is not, some steps later"
        )
    return MEANING[explained.cause]


MEANING = {
    "machine": "cause: the machine. The run's own step was not what the same step is here",
    "precision": "cause: precision. The step is ordinary with precision.compute=float32",
    "data": "cause: the data. Without these samples the step is ordinary; "
    "guard.policy=rollback leaves such samples out",
    "rate": "cause: the learning rate, which rose to {rate:.3g}. At {usual:.3g} the step is "
    "ordinary",
    "unexplained": "cause: unknown. The replay is equal to the bit, and no change heals the step",
    "ordinary": "nothing to explain: the replay is equal to the bit, and the step is not a spike",
}
