"""`spmdtrain diff`: lists the differences between two runs, the likeliest cause first."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.record.replay import take_flags
from spmdtrain.cli.run.waiting import waiting
from spmdtrain.cli.shared_arguments import add_devices, add_make, add_own, positive_int
from spmdtrain.config import DONE, UNEQUAL
from spmdtrain.lab.diff import FEW

if TYPE_CHECKING:
    from spmdtrain.lab.diff.diff import Compared

MOST_LISTED = 6  # differences of one sort in a line
LONGEST = 40  # characters of a value


def add_diff(commands) -> None:
    """Adds the command `diff` and its arguments."""
    diff = commands.add_parser(
        "diff", help="say what differs between two runs, by rounding or by a cause, likeliest first"
    )
    diff.add_argument("a", metavar="A", help="run directory")
    diff.add_argument("b", metavar="B", help="run directory to compare it with")
    diff.add_argument(
        "--steps",
        type=positive_int,
        default=FEW,
        metavar="N",
        help=f"steps after the first difference that are judged by replays of A (default: {FEW})",
    )
    diff.add_argument(
        "--no-replay",
        action="store_true",
        help="compare only the files, so what is due to rounding stays unclear",
    )
    add_make(diff)
    add_own(diff)
    diff.add_argument("--json", action="store_true", help="print JSON")
    add_devices(diff)
    diff.set_defaults(command=run_diff)


def run_diff(parsed: argparse.Namespace) -> int:
    """Prints the differences. Returns UNEQUAL if they are, or may be, more than rounding."""
    if not parsed.no_replay:
        take_flags(Path(parsed.a), 1)
    with waiting(parsed, f"comparing {parsed.a} with {parsed.b}"):
        from spmdtrain.lab.diff.diff import diff

        compared = diff(
            parsed.a,
            parsed.b,
            replays=not parsed.no_replay,
            steps=parsed.steps,
            make=parsed.make,
            own=parsed.own,
        )
    print(json.dumps(compared.document()) if parsed.json else describe(compared))
    return DONE if compared.verdict in ("identical", "rounding") else UNEQUAL


def describe(compared: "Compared") -> str:
    """Describes the comparison: a line for each sort of difference, and the cause last."""
    parts = (_settings, _code, _devices, _data, _program, _loss, _speed, _cause)
    return "\n".join(f"{part.__name__[1:]:11} {line}" for part in parts for line in part(compared))


def _settings(compared: "Compared") -> Iterator[str]:
    if not compared.settings:
        yield f"same, all {compared.of_settings}"
        return
    order = {cause.name: place for place, cause in enumerate(compared.causes)}
    listed = sorted(compared.settings, key=lambda setting: order.get(setting.name, len(order)))
    no_step = compared.verdict == "identical"
    changes = [
        f"{setting.name} {_value(setting.a)} -> {_value(setting.b)}"
        + (" (no step reads it)" if no_step or setting.decides == "none" else "")
        for setting in listed
    ]
    yield f"{_listed(changes, '; ')}  ({len(changes)} of {compared.of_settings} differ)"


def _code(compared: "Compared") -> Iterator[str]:
    if None in compared.hosts:  # a run of an older version, which did not record its starts
        yield "not recorded"
        return
    changes = [f"{part.what} {_value(part.a)} -> {_value(part.b)}" for part in compared.code]
    yield _listed(changes, "; ") or "same: sources, versions and flags"


def _devices(compared: "Compared") -> Iterator[str]:
    if None in compared.hosts:
        yield "not recorded"
        return
    changes = [f"{fact.what} {_value(fact.a)} -> {_value(fact.b)}" for fact in compared.devices]
    if compared.hosts[0] != compared.hosts[1]:
        changes.append(f"host {compared.hosts[0]} -> {compared.hosts[1]}")
    yield _listed(changes, "; ") or "same"


def _data(compared: "Compared") -> Iterator[str]:
    data = compared.data
    if data.step is not None:
        known = [samples for samples in data.samples if len(samples) == 2]
        ranges = " and ".join(f"{first} to {last}" for first, last in known)
        yield f"other tokens from step {data.step}" + (f", samples {ranges}" if ranges else "")
    elif data.hashed:
        yield f"same: the tokens of {_count(data.hashed, 'step')} hash alike"
    else:
        yield {True: "same fingerprint", False: "another corpus", None: "not recorded"}[data.corpus]


def _program(compared: "Compared") -> Iterator[str]:
    program = compared.program
    if program.same is None:
        yield "not recorded"
    elif program.same:
        yield "same, but for names"
    elif not (program.opcodes or program.sent or program.memory):
        yield "constants or shapes differ; instructions, collectives and memory are the same"
    else:
        counts = [f"{count:+} {name}" for name, count in program.opcodes.items()]
        changes = [_listed(counts, ", ")] if counts else []
        changes += [_pair(f"sent over {axis}", pair) for axis, pair in program.sent.items()]
        changes += [
            _pair(name.replace("_bytes", ""), pair) for name, pair in program.memory.items()
        ]
        yield "; ".join(changes)


def _pair(name: str, pair: Sequence[float]) -> str:
    from spmdtrain.lab.page.formats import size

    return f"{name} {size(pair[0])} -> {size(pair[1])}"


def _loss(compared: "Compared") -> Iterator[str]:
    part = compared.parting
    if part.verdict == "identical":
        yield f"identical: every figure of {_count(part.steps, 'step')} equal to the bit"
        return
    apart = "" if part.apart is None else f", {part.apart:.1e} apart"
    first = f"other bits from step {part.first} ({part.figure}{apart})"
    if part.scale is None:
        yield f"{first}, where the runs were fed other tokens"
    elif part.scale == "siblings":
        times = f"{part.times:.3g} times what rounding may do"
        if part.beyond:
            yield f"{first}; beyond rounding from step {part.beyond} ({part.in_figure}, {times})"
        else:
            yield f"{first}; within rounding up to step {part.judged_to}: {times}"
    else:
        beyond = "farther than rounding goes" if part.beyond else "rounding or not is unclear"
        yield f"{first}; {beyond}, by the files alone: {part.without}"
    if part.tail is not None:
        low = "lower" if part.tail < 0 else "higher"
        yield f"second half of {part.steps} steps: B {low} by {abs(part.tail):.2g} on average"


def _speed(compared: "Compared") -> Iterator[str]:
    from spmdtrain.lab.page.formats import seconds

    speed = compared.speed
    if speed is None:
        yield "not compared: too few steps"
        return
    steps = f"a step {seconds(speed.seconds[0])} -> {seconds(speed.seconds[1])}"
    if speed.held is None:
        yield f"alike: {steps}"
        return
    slower = speed.ratio if speed.ratio > 1 else 1 / speed.ratio
    who = "B" if speed.ratio > 1 else "A"
    waits = f"{seconds(speed.waits[0])} -> {seconds(speed.waits[1])}"
    why = {
        "input": f"it waits for its input, {waits} a step: try token files, data.read_ahead",
        "size": f"its steps are larger, {speed.tokens[0]:.0f} -> {speed.tokens[1]:.0f} tokens",
        "program": "it runs another program: see above",
        "machine": "same program, and the input keeps up: the machine, or what else ran on it",
    }
    yield f"{who} {slower:.2f} times slower, {steps}: {why[speed.held]}"


def _cause(compared: "Compared") -> Iterator[str]:
    if not compared.causes:
        yield "none is needed: the runs are identical"
        return
    first, others = compared.causes[0], compared.causes[1:]
    line = MEANING[first.of].format(name=first.name, a=compared.a, step=compared.parting.first)
    if compared.verdict == "rounding":
        line = f"{first.name}, by rounding alone"
    elif _is_placement(compared, first.name):
        line = f"{first.name}: the layout trains something else: spmdtrain certify CONFIG"
    yield line
    if others:
        yield f"less likely: {_listed([cause.name for cause in others], ', ')}"


def _is_placement(compared: "Compared", name: str) -> bool:
    kinds = {setting.name: setting.decides for setting in compared.settings}
    return compared.verdict == "differ" and kinds.get(name) == "placement"


MEANING: Mapping[str, str] = {
    "setting": "{name}",
    "data": "the data: settings are the same, and other tokens came of them",
    "code": "{name}: other code",
    "devices": "the devices: another {name}",
    "machine": "nothing that was recorded differs, so one of the machines computed something "
    "else: spmdtrain replay {a} --step {step} says which",
}


def _listed(items: Sequence[str], between: str) -> str:
    more = f"{between}and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return between.join(items[:MOST_LISTED]) + more


def _value(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _count(count: int, word: str) -> str:
    from spmdtrain.lab.page.formats import plural

    return plural(count, word)
