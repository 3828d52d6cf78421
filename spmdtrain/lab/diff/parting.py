"""Finds where the results of two runs diverge, and whether rounding explains it.

Another mesh sums in another order, so the figures of two correct runs differ in bits, and these
differences grow. Siblings of A are replays of A whose weights start two units in the last place
away (replay/rounding.py); their distance is the scale of a figure. A constant would not do, nor
would the size of the first difference: the effect of a smaller weight decay starts as small as that
of another mesh, and then grows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from spmdtrain.config.errors import UserError
from spmdtrain.lab.diff import FEW
from spmdtrain.lab.replay.first_difference import different_figures
from spmdtrain.lab.replay.opened import open_replay
from spmdtrain.lab.replay.rounding import FIGURES, limits, limits_apart
from spmdtrain.lab.replay.written import WrittenRun
from spmdtrain.models.choose import MakeModel

OF_THE_CLOCK = (
    *("step", "time", "step_seconds", "input_seconds", "tokens_per_second", "mfu"),
    "memory_bytes",
)
CLEAR = 1e-3  # relative; float32 rounding never moves a figure that far within `FEW` steps
SAME_RATE = 1e-6  # of the learning rate, which is computed in float32
Verdict = Literal["identical", "rounding", "differ", "unclear"]


@dataclass(frozen=True)
class Parting:
    """The comparison of the figures of two runs over `steps` common steps, up to step `last`.

    `first` is the first step that is not bit-equal, None if there is none; its figure `figure` has
    the relative difference `apart`. `beyond` is the first step that differs by more than rounding,
    in the figure `in_figure`; `times` is the largest distance of all, over its limit. Steps up to
    `judged_to` were judged, by the siblings or the constant that `scale` names; `without` says why
    there were no siblings. `tail` is the loss of B minus that of A, averaged over the second half
    of the steps. `rate` is the first step with another learning rate.
    """

    steps: int
    last: int
    verdict: Verdict
    first: int | None = None
    figure: str | None = None
    apart: float | None = None
    beyond: int | None = None
    in_figure: str | None = None
    times: float | None = None
    judged_to: int | None = None
    scale: Literal["siblings", "a constant"] | None = None
    without: str = ""
    tail: float | None = None
    rate: int | None = None


@dataclass(frozen=True)
class Scale:
    """The way to make siblings of A. With `replays=False` only files are read.

    `make`, `devices`, `seams` and `own` are what opening A needs, as `replay` takes them.
    """

    replays: bool = True
    steps: int = FEW
    make: MakeModel | str | None = None
    devices: Sequence[jax.Device] | None = None
    seams: Mapping[str, Any] | None = None
    own: Sequence[str] = ()


def first_difference(a: WrittenRun, b: WrittenRun, steps: Sequence[int]) -> tuple[int, str] | None:
    """Returns the first step that is not bit-equal and its first such figure, or None."""
    for step in steps:
        if names := _different(a.figures[step], b.figures[step]):
            return step, names[0]
    return None


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in different_figures(a, b) if name not in OF_THE_CLOCK]


def parting(
    a: WrittenRun, b: WrittenRun, steps: Sequence[int], fed_apart: int | None, scale: Scale
) -> Parting:
    """Compares the figures of two runs over the `steps` in common.

    `fed_apart` is the first step that read other tokens. What follows from that is not rounding,
    and is not judged.
    """
    difference = first_difference(a, b, steps)
    if difference is None and fed_apart is None:
        return Parting(len(steps), steps[-1], "identical")
    first, figure = difference or (fed_apart or steps[0], "tokens")
    facts: dict[str, Any] = {
        "steps": len(steps),
        "last": steps[-1],
        "first": first,
        "figure": figure,
        "apart": _apart(a.figures[first].get(figure), b.figures[first].get(figure)),
        "tail": _tail(a, b, steps),
        "rate": next((at for at in steps if _has_other_rate(a.figures[at], b.figures[at])), None),
    }
    if fed_apart is not None and fed_apart <= first:
        return Parting(**facts, verdict="differ", beyond=fed_apart, in_figure="tokens")
    judged = [step for step in steps if first <= step < first + scale.steps]
    allowed, without = _limits(a, first, judged[-1], scale)
    return Parting(**facts, **_judged(a, b, judged, allowed), without=without)


def _limits(
    a: WrittenRun, first: int, last: int, scale: Scale
) -> tuple[dict[int, dict[str, float]] | None, str]:
    """Returns how far rounding moves the figures by step, or the reason why A was not replayed."""
    if not scale.replays:
        return None, "nothing was replayed"
    try:
        with open_replay(
            a.run,
            first,
            to=last,
            make=scale.make,
            devices=scale.devices,
            seams=scale.seams,
            own=scale.own,
        ) as opened:
            taken = range(opened.start + 1, last + 1)
            centre = [a.figures.get(step, {}) for step in taken]
            return dict(zip(taken, limits(opened, last, centre), strict=True)), ""
    except UserError as error:
        return None, error.what


def _judged(
    a: WrittenRun,
    b: WrittenRun,
    steps: Sequence[int],
    allowed: Mapping[int, Mapping[str, float]] | None,
) -> dict[str, Any]:
    """Returns the verdict, and the step and figure that decided it."""
    farthest = 0.0
    beyond = None
    for step in steps:
        for name in FIGURES:
            then, now = a.figures[step].get(name), b.figures[step].get(name)
            if then is None and now is None:
                continue
            limit = CLEAR * abs(then or 0.0) if allowed is None else allowed[step].get(name, 0.0)
            times = limits_apart(then, now, limit)
            farthest = max(farthest, times)
            if times > 1 and beyond is None:
                beyond = step, name
    within: Verdict = "unclear" if allowed is None else "rounding"
    return {
        "verdict": "differ" if beyond else within,
        "beyond": beyond and beyond[0],
        "in_figure": beyond and beyond[1],
        "times": farthest,
        "judged_to": steps[-1],
        "scale": "a constant" if allowed is None else "siblings",
    }


def _apart(then: float | None, now: float | None) -> float | None:
    """Returns the relative difference of two figures."""
    if then is None or now is None:
        return None
    return abs(now - then) / abs(then) if then else math.inf if now else 0.0


def _has_other_rate(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    apart = _apart(a.get("learning_rate"), b.get("learning_rate"))
    return apart is not None and apart > SAME_RATE


def _tail(a: WrittenRun, b: WrittenRun, steps: Sequence[int]) -> float | None:
    pairs = [(a.figures[at].get("loss"), b.figures[at].get("loss")) for at in steps]
    late = pairs[len(pairs) // 2 :]
    known = [now - then for then, now in late if then is not None and now is not None]
    return sum(known) / len(known) if known else None
