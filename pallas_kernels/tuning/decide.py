"""Decides which of the correct implementations is taken, given their times. Pure.

Rounds are compared pair by pair: what slows a whole round slows both. The default stays unless
another one is faster by more than the noise.
"""

from collections.abc import Mapping, Sequence
from statistics import median

LEAST_GAIN = 0.03  # share of the default's time
LEAST_WON = 0.8  # share of rounds in which a faster one must be faster
FEWEST_ROUNDS = 5


def decide(
    order: Sequence[str], faults: Mapping[str, str], times: Mapping[str, Sequence[float]]
) -> tuple[str | None, str]:
    """Returns (the implementation to take, a remark or "").

    Args:
      order: all candidates, the default first.
      faults: name -> the fault.
      times: name -> seconds of each round, of correct candidates.

    The first is None if every candidate has a fault.
    """
    sound = [name for name in order if name not in faults]
    if not sound:
        return None, "every implementation failed"
    # Implementations that were found correct come before those that there was no time to check.
    default = next((name for name in sound if name in times), sound[0])
    of_default = times.get(default, ())
    best = default
    best_ratio = 1 - LEAST_GAIN
    unsteady = []
    for name in sound:
        pairs = list(zip(times.get(name, ()), of_default, strict=False))
        if name == default or len(pairs) < FEWEST_ROUNDS:
            continue
        ratios = [own / other for own, other in pairs]
        ratio = median(ratios)
        if ratio > best_ratio:
            continue
        won = sum(ratio < 1 for ratio in ratios) / len(ratios)
        if won < LEAST_WON:
            unsteady.append(name)
            continue
        best, best_ratio = name, ratio
    remark = f"times of {', '.join(unsteady)} vary too much to be believed" if unsteady else ""
    return best, remark
