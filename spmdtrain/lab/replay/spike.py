"""Measures how far a step stands out from those before it, in robust standard deviations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FIGURES = ("loss", "grad_norm")
RECENT = 64  # steps before the one in question, by which it is judged
LEAST = 8  # steps before it that are needed for a verdict
NEAR = 3  # steps right before it, which may belong to the spike
OUTSTANDING = 5.0  # deviations from which a step is a spike
PER_MAD = 1.4826  # standard deviations of a normal distribution per median absolute deviation
FLOOR = 0.002  # share of the median: a figure that hardly moves must not make a spike of nothing


def recent(figures: Mapping[int, Mapping[str, Any]], step: int) -> list[Mapping[str, Any]]:
    """Returns the figures of the steps by which `step` is judged, oldest first."""
    steps = range(max(1, step - RECENT), step - NEAR)
    return [figures[at] for at in steps if at in figures]


def deviations(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> float | None:
    """Returns the largest number of deviations by which a figure of `now` lies above those before.

    None if that is unknown, infinite if a figure is not finite.
    """
    most = None
    for name in FIGURES:
        known = [each[name] for each in before if each.get(name) is not None]
        if len(known) < LEAST:
            continue
        middle = float(np.median(known))
        spread = PER_MAD * float(np.median(np.abs(np.array(known) - middle)))
        spread = max(spread, FLOOR * abs(middle), 1e-12)
        for each in now:
            if name not in each:
                continue
            value = each[name]
            above = math.inf if value is None else (value - middle) / spread
            most = above if most is None else max(most, above)
    return most


def is_healed(seen: float, instead: float | None) -> bool:
    """Returns True if a counterfactual has removed a spike, or half of it."""
    if instead is None:
        return False
    return instead < OUTSTANDING or instead < seen / 2
