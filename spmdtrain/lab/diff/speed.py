"""Finds out which of two runs is faster, and what slows down the other."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from spmdtrain.lab.replay.written import WrittenRun

FEWEST = 8  # steps of each run that a judgement needs
WORTH = 1.1  # ratio from which a difference is reported
Held = Literal["input", "size", "program", "machine"]


@dataclass(frozen=True)
class Speed:
    """The speed of A and B: medians of the seconds of a step, the wait for its batch, its tokens.

    `ratio` is the seconds of B over those of A. `held` is what slows the slower one down; None if
    they are alike, which is within a tenth, or with overlapping middle halves of their steps.
    """

    seconds: tuple[float, float]
    waits: tuple[float, float]
    tokens: tuple[float, float]
    ratio: float
    held: Held | None


def speed_of(a: WrittenRun, b: WrittenRun, same_program: bool | None) -> Speed | None:
    """Compares the speeds of two runs. Returns None if one has too few steps.

    The first step after each start is left out.
    """
    seconds, waits, tokens = (
        [_column(run, name) for run in (a, b)]
        for name in ("step_seconds", "input_seconds", "tokens")
    )
    if min(map(len, seconds)) < FEWEST:
        return None
    middles = [float(np.median(column)) for column in seconds]
    waiting = [float(np.median(column)) if len(column) else 0.0 for column in waits]
    sizes = [float(np.median(column)) if len(column) else 0.0 for column in tokens]
    slow = int(middles[1] > middles[0])
    fast = 1 - slow
    held: Held | None = None
    overlap = np.quantile(seconds[slow], 0.25) <= np.quantile(seconds[fast], 0.75)
    if middles[slow] > WORTH * middles[fast] and not overlap:
        more = middles[slow] - middles[fast]
        if waiting[slow] - waiting[fast] >= more / 2:
            held = "input"
        elif sizes[slow] > WORTH * sizes[fast]:
            held = "size"
        else:
            held = "program" if same_program is False else "machine"
    return Speed(
        (middles[0], middles[1]),
        (waiting[0], waiting[1]),
        (sizes[0], sizes[1]),
        middles[1] / middles[0] if middles[0] else 1.0,
        held,
    )


def _column(run: WrittenRun, name: str) -> np.ndarray:
    """Returns a figure of every step but the first after each start."""
    first = {start["from_step"] + 1 for start in run.starts} | {min(run.figures, default=0)}
    numbers = [
        line[name]
        for step, line in run.figures.items()
        if step not in first and isinstance(line.get(name), int | float)
    ]
    return np.array(numbers, np.float64)
