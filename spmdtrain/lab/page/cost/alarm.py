"""Detects that the newest steps are slower than earlier ones, and names the component to blame.

Steps are grouped into windows. The ratio of measured to predicted seconds of a window is compared
with those of earlier windows. A prediction is one number for the whole run, so without one the
seconds themselves do as well.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

from spmdtrain.lab.page.columns import median
from spmdtrain.lab.page.read import RunRead, is_number

WINDOW = 20  # steps
BEFORE = 8  # windows that define the band
FEWEST = 3  # windows that a band needs
SPREADS = 5.0  # robust standard deviations around their median
LEAST = 0.1  # of their median: the narrowest band


class Alarm(NamedTuple):
    """An alarm: the newest window, which starts with step `first`, is above the band.

    It has its ratio, the `usual` one, and the `component` to blame. The figures are measured over
    predicted seconds; without a prediction they are seconds, and `predicted` is None.
    """

    first: int
    ratio: float
    usual: float
    component: Literal["input", "step"]
    predicted: float | None


def alarm(run: RunRead) -> Alarm | None:
    """Returns an alarm if the newest steps are slower than the band, or None."""
    took, waits = run.steps["step_seconds"][1:], run.steps["input_seconds"][1:]
    steps = run.steps["step"][1:]
    count = len(took) // WINDOW
    if count <= FEWEST:
        return None
    first = len(took) - min(count, BEFORE + 1) * WINDOW
    seconds, waiting = (_windows(column[first:]) for column in (took, waits))
    usual = float(np.median(seconds[:-1]))
    spread = 1.4826 * float(np.median(np.abs(seconds[:-1] - usual)))
    more = float(seconds[-1]) - usual
    if not more > max(SPREADS * spread, LEAST * usual):
        return None
    waited = float(waiting[-1]) - float(np.median(waiting[:-1]))
    predicted: Any = run.predicted.get("step_seconds")
    known = float(predicted) if is_number(predicted) and predicted > 0 else None
    scale = known or 1.0
    component = "input" if waited >= more / 2 else "step"
    begin = int(steps[-WINDOW])
    return Alarm(begin, float(seconds[-1]) / scale, usual / scale, component, known)


def _windows(values: np.ndarray) -> np.ndarray:
    return np.array([median(window) for window in values.reshape(-1, WINDOW)])
