"""What must hold of a draw, whatever is drawn. `examine` is the order in which it is asked.

1. It is refused in one line, or it trains; any other exception is a finding.
2. Every number it reports, and where its parameters end, is that of one device but for rounding
   (agreement.py).
3. Nothing is infinite or not a number, unless the run says that it diverged.
4. Stopped and resumed it goes on: in the same layout bit by bit, in another within rounding.
5. A setting that is changed before it goes on is obeyed, or refused by name: the checkpoint is not
   to blame.
6. Its files agree with each other and with what happened (files.py).
7. In 16 bits its step is that of float32, leaf by leaf, in its layout and on one device:
   two runs that are equally narrow agree whatever they lose.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

from fuzz import files
from fuzz.agreement import BFLOAT16, FLOAT32, Floor, Oracle, differences
from fuzz.draw import ONE_DEVICE, Draw, after, settings_of
from fuzz.kinds import without_numbers
from fuzz.runs import Run, Stop, lines_of, run
from fuzz.settings import BASE_FILE, Values, overrides
from spmdtrain.config import RunConfig, UserError, load
from spmdtrain.data.source import open_data
from spmdtrain.lab.certify.cover import Layout
from spmdtrain.lab.certify.shrink import shrink
from spmdtrain.lab.certify.stepper import Own
from spmdtrain.lab.certify.witnesses.own_precision import is_narrow, narrow_gradients
from spmdtrain.lab.certify.witnesses.witness import rate_of
from spmdtrain.train.shard import shard

ADVICE = re.compile(
    r"--set ((?:rules|pipeline|train\.microbatch|train\.remat|model\.attention)[\w.]*)=([\w,]*)"
)
MOST_ADVICE = 6
NARROW_TOKENS = 2048  # of a device in one microbatch: a sum that is not wide loses most of them
# What decides which tokens a sample index means: a checkpoint cannot go on with another.
STREAM = (
    "train.seed",
    "train.sequence_length",
    "data.corpus",
    "data.shuffle",
    "data.packing",
    "data.validation_fraction",
)


@dataclass
class Report:
    """`refused`: kinds of refusals met, also of those whose advice helped. `excused`:
    differences beyond the floor that the run's own sensitivity to rounding explains. `alone`: one
    device refuses these numbers, and no layout was tried.
    """

    draw: Draw
    outcome: str = "trained"
    refused: list[str] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)  # (kind, what was seen)
    excused: int = 0
    alone: bool = False

    def find(self, kind: str, where: str, said: object) -> None:
        """Once for each kind: the same fault shows in one leg of a draw after the other."""
        if kind not in self.kinds():
            self.findings.append((kind, f"{where}: {said}"))

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.findings}


class Oracles:
    """Runs on one device, the last few of them kept: neighbouring draws share theirs."""

    KEPT = 4

    def __init__(self, room: Path):
        self._room, self._kept = room, {}

    def of(self, numbers: Values) -> Oracle:
        key = repr(sorted(numbers.items()))
        if key not in self._kept:
            self._kept = dict(list(self._kept.items())[1 - self.KEPT :])
            self._kept[key] = self._made(numbers)
        return self._kept[key]

    def _made(self, numbers: Values) -> Oracle:
        def once(nudge=None):
            with tempfile.TemporaryDirectory(dir=self._room) as directory:
                return run(numbers, ONE_DEVICE, Path(directory) / "run", nudge=nudge)

        directory = Path(tempfile.mkdtemp(dir=self._room))
        return Oracle(run(numbers, ONE_DEVICE, directory / "run"), floor_of(numbers), once)


def examine(draw: Draw, oracles: Oracles, room: Path) -> Report:
    report = Report(draw)
    oracle = oracles.of(draw.numbers)
    if not _sound(report, oracle.run, draw.numbers, ONE_DEVICE, "one device"):
        report.alone = report.outcome == "refused"
        return report
    check_narrow(report)
    with tempfile.TemporaryDirectory(dir=room) as directory:
        if draw.end in ("whole", "same"):
            _whole(report, oracle, Path(directory))
        else:
            _moved(report, oracle, Path(directory))
    return report


def check_narrow(report: Report) -> None:
    """Holds the gradients of a draw in 16 bits against float32, on one device and in its layout."""
    draw = report.draw
    for values in (ONE_DEVICE, draw.layout):
        settings, devices = settings_of(draw.numbers, values)
        config = load(BASE_FILE, overrides(settings))
        if not is_narrow(config.precision) or config.train.learns_pairs:
            return
        wide, narrow = (
            shrink(config, as_is=True, precision=which).config for which in ("float32", "asked")
        )
        here = sorted(settings.keys() & draw.layout.keys()) if values is draw.layout else ()
        layout = Layout(tuple(overrides({key: settings[key] for key in here})), "drawn")
        try:
            found = narrow_gradients(wide, narrow, layout, Own(), tokens=NARROW_TOKENS)
        except UserError as refused:
            report.refused.append(f"narrow gradients: {without_numbers(str(refused))}")
            return
        if not found.holds:
            report.find("a step in 16 bits is not that of float32", layout.name, found.details)


# --- the four ends --------------------------------------------------------------------------------


def _whole(report: Report, oracle: Oracle, room: Path) -> None:
    draw = report.draw
    whole, layout = _advised(report, draw.numbers, draw.layout, room / "whole")
    if not _sound(report, whole, draw.numbers, layout, "in this layout"):
        return
    _compare(report, whole, oracle, draw.numbers, "in this layout")
    if whole.end != "finished":
        return
    if draw.end == "same":
        _resumed_bit_by_bit(report, whole, layout, room / "cut")
    again = run(draw.numbers, layout, whole.directory)
    if again.end != "nothing to do":
        report.find(
            f"a finished run, asked again: {again.end}, {again.kind}", "in this layout", again.said
        )


def _resumed_bit_by_bit(report: Report, whole: Run, layout: Values, directory: Path) -> None:
    draw = report.draw
    cut = run(draw.numbers, layout, directory, Stop(draw.stop, draw.by))
    if not _sound(report, cut, draw.numbers, layout, "stopped"):
        return
    resumed = run(draw.numbers, layout, directory)
    if not _sound(report, resumed, draw.numbers, layout, "resumed"):
        return
    unequal = [str(each) for each in differences(resumed, whole, FLOAT32) if each.got != each.want]
    last = max(whole.seen.saved)
    for path, value in whole.seen.saved[last].items():
        if not np.array_equal(
            value, resumed.seen.saved[last][path], equal_nan=value.dtype.kind == "f"
        ):
            unequal.append(f"{path} after step {last}")
    if unequal:
        report.find("not bit by bit the same", "resumed in the same layout", unequal)


def _moved(report: Report, oracle: Oracle, room: Path) -> None:
    draw = report.draw
    stop = Stop(draw.stop, draw.by)
    cut, layout = _advised(report, draw.numbers, draw.layout, room / "cut", stop)
    if not _sound(report, cut, draw.numbers, layout, "stopped"):
        return
    _compare(report, cut, oracle, draw.numbers, "stopped")
    if cut.end not in ("killed", "preempted"):
        return
    if draw.end == "changed":
        _changed(report, cut, room)
        return
    if draw.end == "begun":
        _begun(report, cut, room)
        return
    resumed, onto = _advised(report, draw.numbers, draw.onto, cut.directory)
    if resumed.kind.startswith("CheckpointError"):
        report.find(resumed.kind, "resumed in another layout", resumed.said)
    elif _sound(report, resumed, draw.numbers, onto, "resumed in another layout"):
        _compare(report, resumed, oracle, draw.numbers, "resumed in another layout")


def _changed(report: Report, cut: Run, room: Path) -> None:
    """The same change on one device and in another layout, both from the same checkpoint."""
    draw = report.draw
    numbers = after(draw.numbers, draw.change)
    names = ", ".join(sorted(draw.change))
    newest = max(files.listed(cut.directory), default=None)
    start = room / "start"
    shutil.copytree(cut.directory, start)

    def once(nudge=None):
        with tempfile.TemporaryDirectory(dir=room) as directory:
            shutil.copytree(start, Path(directory) / "run")
            return run(numbers, ONE_DEVICE, Path(directory) / "run", nudge=nudge)

    shutil.copytree(start, room / "one")
    alone = run(numbers, ONE_DEVICE, room / "one")
    there, onto = _advised(report, numbers, draw.onto, cut.directory)
    for each, where in ((alone, "on one device"), (there, "in another layout")):
        if each.end == "broken":
            report.find(f"traceback: {each.kind}", f"{names} changed, {where}", each.said)
        if "cannot be read" in each.said:
            report.find(
                "an intact checkpoint is called unreadable", f"{names} changed, {where}", each.said
            )
    if newest is not None and _must_be_refused(draw):
        for each, where in ((alone, "on one device"), (there, "in another layout")):
            if each.end == "finished":
                kind = f"accepted, though the checkpoint does not fit: {names} changed"
                report.find(kind, where, draw.change)
        return
    if {alone.kind[:15], there.kind[:15]} == {"", "CheckpointError"}:
        kind = f"{names} changed: one layout goes on, another does not"
        report.find(
            kind,
            "on one device",
            f"{alone.said or alone.end}; the other: {there.said or there.end}",
        )
    where = "changed and resumed in another layout"
    if alone.end == "finished" and _sound(
        report, there, numbers, onto, where, newest or 0, draw.numbers
    ):
        _obeyed(report, there, numbers, draw.change)
        reference = Oracle(alone, floor_of(numbers, draw.numbers), once)
        _compare(report, there, reference, numbers, where)
    elif alone.end == "refused":
        report.refused.append(f"changed: {alone.kind}")


def _begun(report: Report, cut: Run, room: Path) -> None:
    """Other runs that begin with its weights, on one device and in another layout."""
    draw = report.draw
    if not files.listed(cut.directory):
        return
    numbers = draw.numbers | {"train.init_from": str(cut.directory)}

    def once(nudge=None):
        with tempfile.TemporaryDirectory(dir=room) as directory:
            return run(numbers, ONE_DEVICE, Path(directory) / "run", nudge=nudge)

    alone = run(numbers, ONE_DEVICE, room / "one")
    there, onto = _advised(report, numbers, draw.onto, room / "there")
    where = "begun with the weights of a run in another layout"
    if not _sound(report, alone, numbers, ONE_DEVICE, "begun on one device"):
        return
    if _sound(report, there, numbers, onto, where):
        _compare(report, there, Oracle(alone, floor_of(numbers), once), numbers, where)


# --- what is asked at each of them ----------------------------------------------------------------


def _advised(
    report: Report, numbers: Values, layout: Values, directory: Path, stop: Stop | None = None
) -> tuple[Run, Values]:
    """A run, and its layout; where it is refused with advice on the layout, the run that obeys."""
    layout = dict(layout)
    for _ in range(MOST_ADVICE):
        ran = run(numbers, layout, directory, stop)
        advice = ADVICE.search(ran.said) if ran.end == "refused" else None
        if not advice:
            return ran, layout
        key, value = advice.groups()
        if layout.get(key) == value:
            report.find(f"advice that does not help: {ran.kind}", f"{key}={value}", ran.said)
            return ran, layout
        report.refused.append(f"{ran.kind} (advice taken)")
        layout[key] = value
    return ran, layout


def _sound(  # noqa: PLR0913 - what was asked, before and after a change
    report: Report,
    ran: Run,
    numbers: Values,
    layout: Values,
    where: str,
    changed_at: int = 0,
    numbers_before: Values | None = None,
) -> bool:
    """Whether there is a run to look at; its files are looked at here.

    Up to the step `changed_at` it ran with `numbers_before`, where they are given.
    """
    if ran.end == "refused":
        report.outcome = "refused"
        report.refused.append(ran.kind)
        return False
    if ran.end == "broken":
        report.find(f"traceback: {ran.kind}", where, ran.said)
        return False
    config = load(BASE_FILE, overrides(settings_of(numbers, layout)[0]))
    before = None
    if numbers_before is not None:
        before = load(BASE_FILE, overrides(settings_of(numbers_before, layout)[0]))
    for fault in files.faults(ran, config, changed_at, before):
        report.find(f"files: {without_numbers(fault)}", where, fault)
    for fault in _rates(ran, config):
        report.find("learning rate is not the schedule's", where, fault)
    return True


def _compare(report: Report, got: Run, oracle: Oracle, numbers: Values, where: str) -> None:
    ends = {got.end, oracle.run.end}
    if "diverged" in ends and ends not in (
        {"diverged"},
        {"diverged", "killed"},
        {"diverged", "preempted"},
    ):
        said = f"here: {got.end} {got.said}; one device: {oracle.run.end}"
        report.find("diverges in one layout, not in the other", where, said)
    wrong, excused = oracle.judged(got)
    report.excused += excused
    if wrong:
        name = "float32" if floor_of(numbers) is FLOAT32 else "bfloat16"
        report.find(f"numbers differ from one device, {name}", where, "; ".join(wrong))


def floor_of(*numbers: Values) -> Floor:
    """By the lowest precision in use."""
    used = {
        each.get(f"precision.{what}", "float32")
        for each in numbers
        for what in ("compute", "params", "accumulate")
    }
    return FLOAT32 if used == {"float32"} else BFLOAT16


def _rates(ran: Run, config: RunConfig) -> Iterator[str]:
    """Against the schedule as README tells it; not of steps taken before the run went on with
    other settings.
    """
    resumed = [
        line["step"]
        for line in lines_of(ran.directory / "events.jsonl")
        if line["event"] == "resumed"
    ]
    for step, figures in ran.steps.items():
        asked = rate_of(config.optimizer, config.train.steps, step - 1)
        if (
            step > max(resumed, default=0)
            and abs(figures["learning_rate"] - asked) > 2e-6 * asked + 1e-12
        ):
            yield f"step {step}: {figures['learning_rate']}, asked {asked}"


def _obeyed(report: Report, ran: Run, numbers: Values, change: Values) -> None:
    """config.json has what was asked."""
    asked = load(BASE_FILE, overrides(numbers)).model_dump(mode="json")
    said = json.loads((ran.directory / "config.json").read_text())["config"]
    for key in sorted(change.keys() & numbers.keys()):  # `after` drops those of another class
        section, name = key.split(".")
        if said[section][name] != asked[section][name] and change[key] is not None:
            report.find("a change is not in config.json", key, said[section][name])


def _must_be_refused(draw: Draw) -> bool:
    """Other data, or parameters of other shapes."""
    now = after(draw.numbers, draw.change)
    before = load(BASE_FILE, overrides(draw.numbers)).model_dump()
    asked = load(BASE_FILE, overrides(now)).model_dump()
    for key in STREAM:
        section, name = key.split(".")
        if before[section][name] != asked[section][name]:
            return True
    return _shapes(*overrides(draw.numbers)) != _shapes(*overrides(now))


@lru_cache(maxsize=8)
def _shapes(*settings: str) -> dict | None:
    """Of every parameter, by its path; None where the data do not serve these settings."""
    try:
        config, _ = open_data(load(BASE_FILE, list(settings)))
    except UserError:
        return None
    setup = shard(config, devices=jax.devices()[:1])
    return {path: x.shape for path, x in setup.state.params.items()}
