"""Measures how far a step stands out from earlier ones, in robust standard deviations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FIGURES = ("loss", "grad_norm")
RECENT = 64  # earlier steps with which a step is compared
LEAST = 8  # earlier steps that a verdict needs
NEAR = 3  # steps just before it, which may belong to the spike
OUTSTANDING = 5.0  # deviations from which a step is a spike
PER_MAD = 1.4826  # standard deviations of a normal distribution per median absolute deviation
FLOOR = 0.002  # least deviation, relative to the median: for a figure that hardly moves


def recent(figures: Mapping[int, Mapping[str, Any]], step: int) -> list[Mapping[str, Any]]:
    """Returns the figures of the steps with which `step` is compared, oldest first."""
    steps = range(max(1, step - RECENT), step - NEAR)
    return [figures[at] for at in steps if at in figures]


def deviations(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> float | None:
    """Returns by how many deviations a figure of `now` exceeds those before, at most.

    None if too few steps have it, infinite if a figure is not finite.
    """
    largest = None
    for name in FIGURES:
        known = [figures[name] for figures in before if figures.get(name) is not None]
        if len(known) < LEAST:
            continue
        middle = float(np.median(known))
        spread = PER_MAD * float(np.median(np.abs(np.array(known) - middle)))
        spread = max(spread, FLOOR * abs(middle), 1e-12)
        for figures in now:
            if name not in figures:
                continue
            value = figures[name]
            above = math.inf if value is None else (value - middle) / spread
            largest = above if largest is None else max(largest, above)
    return largest


def is_healed(before: float, after: float | None) -> bool:
    """Returns True if a change has removed a spike of `before` deviations, or half of it."""
    if after is None:
        return False
    return after < OUTSTANDING or after < before / 2
