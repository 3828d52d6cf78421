"""Chooses the source of each sample of a mixture, as a pure function of the sample index.

A mixture is a *period* of slots, repeated for ever. In a period each source has as many slots as
its share says, so that shares are exact over any window as long as a period, wherever it begins. A
period is as short as it can be: 10 slots for the weights 0.7, 0.2 and 0.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby
from math import lcm

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.data.indices import sample_indices

# Where the exact shares have a longer period than this, they are rounded to as many parts.
LONGEST_PERIOD = 2**16
FREE = -1


@dataclass(frozen=True)
class Mixture:
    """The order of several sources."""

    counts: tuple[int, ...]  # slots of each source in a period

    @cached_property
    def period(self) -> np.ndarray:
        """The source of each slot of a period, int64."""
        return _arrange(self.counts)

    @cached_property
    def _ranks(self) -> np.ndarray:
        """Counts the slots of the same source before each slot, int64 [period]."""
        counts = np.array(self.counts)
        ranks = np.empty(len(self.period), np.int64)
        by_source = np.argsort(self.period, kind="stable")
        ranks[by_source] = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
        return ranks

    @property
    def shares(self) -> list[float]:
        """The share of each source; they add up to 1."""
        total = sum(self.counts)
        return [count / total for count in self.counts]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample, and which of that source's samples it is, int64."""
        turn, slot = np.divmod(sample_indices(indices), len(self.period))
        source = self.period[slot]
        return source, turn * np.array(self.counts)[source] + self._ranks[slot]


def mix(weights: Sequence[float]) -> Mixture:
    """Return the mixture of sources with these weights, which need not add up to 1.

    Weights are taken as the decimal numbers that they are written as. Raises ConfigError where one
    is too small to be drawn at all.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    length = lcm(*(share.denominator for share in shares))
    if length <= LONGEST_PERIOD:
        return Mixture(tuple(int(share * length) for share in shares))
    counts = [int(share * LONGEST_PERIOD) for share in shares]
    left_over = [
        share * LONGEST_PERIOD - count for share, count in zip(shares, counts, strict=True)
    ]
    by_rest = sorted(range(len(shares)), key=lambda source: -left_over[source])
    for source in by_rest[: LONGEST_PERIOD - sum(counts)]:
        counts[source] += 1
    if min(counts) == 0:
        least = counts.index(0)
        raise ConfigError(
            f"data.mix: weight {weights[least]} is less than 1 in {LONGEST_PERIOD} samples",
            fix="a larger weight, or no such source",
        )
    return Mixture(tuple(counts))


def _arrange(counts: Sequence[int]) -> np.ndarray:
    """Return a period: the source of each slot, int64.

    After any number of slots no source is a whole sample ahead of its share or behind it. A source
    that has 1 slot in m stands in each m-th, where those of larger sources leave it room.
    """
    regular = _place_regular(counts)
    period = _fill(counts, regular)
    if period is None:  # the regular ones stand in the way of the others
        period = _fill(counts, np.full(sum(counts), FREE))
    assert period is not None, "without regular places there is always a way (Tijdeman, 1980)"
    return period


def _place_regular(counts: Sequence[int]) -> np.ndarray:
    """Put the sources that have 1 slot in m into each m-th slot, the largest source first."""
    length = sum(counts)
    period = np.full(length, FREE)
    by_size = sorted(range(len(counts)), key=lambda source: -counts[source])
    for count, sources in groupby(by_size, key=lambda source: counts[source]):
        if length % count:
            continue
        every = length // count
        # Turn t of `every` is the slots t, t + every, ...; a source takes a turn that is all free,
        # and no other turn of the same length.
        is_free = (period.reshape(count, every) == FREE).all(0)
        turns = (every // 2 + np.arange(every)) % every  # from the middle of its time
        for source, turn in zip(sources, turns[is_free[turns]].tolist(), strict=False):
            period[turn::every] = source
    return period


def _fill(counts: Sequence[int], regular: np.ndarray) -> np.ndarray | None:
    """Fill the free slots of a period; None where a sample would come too late.

    The j-th sample of n in a period of P slots may stand in the slots floor(j P / n) up to, but not
    at, ceil((j + 1) P / n): then no source is ever a whole sample ahead or behind. Of those that
    may, the one that must be placed first is: the earliest deadline, by which a way is found if
    there is one.
    """
    length = len(regular)
    period = regular.copy()
    placed = set(regular.tolist())
    waiting = [(0, source, 0) for source in range(len(counts)) if source not in placed]
    ready: list[tuple[int, int, int]] = []  # (deadline, source, number of the sample)
    for slot in np.flatnonzero(regular == FREE).tolist():
        while waiting and waiting[0][0] <= slot:  # (first slot, source, number of the sample)
            _, source, done = heappop(waiting)
            heappush(ready, (-(-(done + 1) * length // counts[source]), source, done))
        if not ready or slot >= ready[0][0]:
            return None
        _, source, done = heappop(ready)
        period[slot] = source
        done += 1
        if done < counts[source]:
            heappush(waiting, (done * length // counts[source], source, done))
    return period
