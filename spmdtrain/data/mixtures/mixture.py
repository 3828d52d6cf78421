"""Chooses the source of each sample of a mixture, as a pure function of the sample index.

A mixture is a *period* of slots, repeated forever. In a period each source has slots in proportion
to its share, so shares are exact over any window as long as a period, wherever it begins. The
period is as short as possible: 10 slots for the weights 0.7, 0.2 and 0.1.
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

# If the exact shares need a longer period than this, they are rounded to this many parts.
LONGEST_PERIOD = 2**16
FREE = -1


@dataclass(frozen=True)
class Mixture:
    """The order in which several sources are drawn."""

    counts: tuple[int, ...]  # slots of each source in a period; 0: it is never drawn

    @cached_property
    def period(self) -> np.ndarray:
        """The source of each slot of a period, int64."""
        return _arrange(self.counts)

    @cached_property
    def _ranks(self) -> np.ndarray:
        """The number of earlier slots of the same source in the period, int64 [period]."""
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
        """Returns the source of each sample and its index within that source, int64."""
        turn, slot = np.divmod(sample_indices(indices), len(self.period))
        source = self.period[slot]
        return source, turn * np.array(self.counts)[source] + self._ranks[slot]

    def drawn(self, samples: int) -> np.ndarray:
        """Returns how many of the first `samples` come from each source, int64."""
        turns, slots = divmod(samples, len(self.period))
        begun = np.bincount(self.period[:slots], minlength=len(self.counts))
        return turns * np.array(self.counts, np.int64) + begun


def mix(weights: Sequence[float]) -> Mixture:
    """Returns the mixture of sources with these weights, which need not add up to 1.

    Weights count as the decimal numbers they are written as. Raises ConfigError if one is too small
    to ever be drawn.
    """
    shares = shares_of(weights)
    counts = nearest(shares, LONGEST_PERIOD)
    for weight, count in zip(weights, counts, strict=True):
        if weight and not count:
            raise ConfigError(
                f"data.mix: weight {weight} is less than 1 in {LONGEST_PERIOD} samples",
                fix="a larger weight, or no such source",
            )
    return Mixture(counts)


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Returns the exact share of each of these weights, as decimal numbers."""
    exact = [Fraction(repr(weight)) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def nearest(shares: Sequence[Fraction], longest: int) -> tuple[int, ...]:
    """Returns the slots of each source in the shortest period with these shares.

    If it is longer than `longest`, the shares are rounded to as many parts.
    """
    length = lcm(*(share.denominator for share in shares))
    if length <= longest:
        return tuple(int(share * length) for share in shares)
    counts = [int(share * longest) for share in shares]
    left_over = [share * longest - count for share, count in zip(shares, counts, strict=True)]
    by_rest = sorted(range(len(shares)), key=lambda source: -left_over[source])
    for source in by_rest[: longest - sum(counts)]:
        counts[source] += 1
    return tuple(counts)


def _arrange(counts: Sequence[int]) -> np.ndarray:
    """Returns a period: the source of each slot, int64.

    After any number of slots, no source is a whole sample ahead of its share or short of it. A
    source with 1 slot in m takes every m-th, if larger sources leave it room.
    """
    regular = _place_regular(counts)
    period = _fill(counts, regular)
    if period is None:  # the regular ones block the others
        period = _fill(counts, np.full(sum(counts), FREE))
    assert period is not None, "without regular places there is always a way (Tijdeman, 1980)"
    return period


def _place_regular(counts: Sequence[int]) -> np.ndarray:
    """Puts each source with 1 slot in m into every m-th slot, the largest source first."""
    length = sum(counts)
    period = np.full(length, FREE)
    drawn = [source for source, count in enumerate(counts) if count]
    by_size = sorted(drawn, key=lambda source: -counts[source])
    for count, sources in groupby(by_size, key=lambda source: counts[source]):
        if length % count:
            continue
        every = length // count
        # Turn t of `every` is the slots t, t + every, ...; a source takes one turn that is entirely
        # free.
        is_free = (period.reshape(count, every) == FREE).all(0)
        turns = (every // 2 + np.arange(every)) % every  # from the middle of its period
        for source, turn in zip(sources, turns[is_free[turns]].tolist(), strict=False):
            period[turn::every] = source
    return period


def _fill(counts: Sequence[int], regular: np.ndarray) -> np.ndarray | None:
    """Returns the period with its free slots filled; None if a sample would come too late.

    The j-th of n samples in a period of P slots may take the slots floor(j P / n) up to, but not
    including, ceil((j + 1) P / n): then no source is ever a whole sample off its share. Of the
    samples that may take a slot, the one with the earliest deadline does; this finds an order if
    one exists.
    """
    length = len(regular)
    period = regular.copy()
    placed = set(regular.tolist())
    unplaced = [source for source, count in enumerate(counts) if count and source not in placed]
    waiting = [(0, source, 0) for source in unplaced]
    ready: list[tuple[int, int, int]] = []  # (deadline, source, index of the sample)
    for slot in np.flatnonzero(regular == FREE).tolist():
        while waiting and waiting[0][0] <= slot:  # (first slot, source, index of the sample)
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
