"""Joins mixtures with different weights, each for a range of samples: the phases of a run.

The source of a sample, and its place within the source, are a pure function of the sample index
here too. A source continues in a phase where it was in the one before, so none of its samples is
read twice or left out.

Weights that change linearly do so in `PIECES` equal ranges, each a mixture with the weights of its
middle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from spmdtrain.config.schema import MixPhase
from spmdtrain.data.indices import sample_indices
from spmdtrain.data.mixtures.mixture import Mixture, mix, nearest, shares_of

PIECES = 32
PARTS = 2**12  # of the samples of a piece: its weights are rounded to these


@dataclass(frozen=True)
class PhasedMixture:
    """The mixtures of a run, each with the sample from which it applies; `firsts[0]` is 0."""

    firsts: tuple[int, ...]
    mixtures: tuple[Mixture, ...]

    @property
    def shares(self) -> list[float]:
        """The share of each source in the last phase, which has no end."""
        return self.mixtures[-1].shares

    @property
    def identity(self) -> list[str]:
        """The numbers that decide the order of the sources, as words without spaces."""
        counts = [list(map(str, mixture.counts)) for mixture in self.mixtures]
        later = zip(self.firsts[1:], counts[1:], strict=True)
        return counts[0] + [
            word for first, of_phase in later for word in (f"from={first}", *of_phase)
        ]

    @cached_property
    def _before(self) -> np.ndarray:
        """The samples of each source before each mixture begins, int64 [mixtures, sources]."""
        lengths = np.diff(self.firsts).tolist()
        drawn = [mixture.drawn(n) for mixture, n in zip(self.mixtures, lengths, strict=False)]
        return np.cumsum([np.zeros(len(self.mixtures[0].counts), np.int64), *drawn], 0)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample and its index within that source, int64."""
        indices = sample_indices(indices)
        at = np.searchsorted(self.firsts, indices, side="right") - 1
        source = np.empty(len(indices), np.int64)
        own = np.empty(len(indices), np.int64)
        for number in np.unique(at).tolist():
            rows = at == number
            drawn, place = self.mixtures[number].locate(indices[rows] - self.firsts[number])
            source[rows] = drawn
            own[rows] = place + self._before[number][drawn]
        return source, own

    def drawn(self, samples: int) -> np.ndarray:
        """Returns how many of the first `samples` come from each source, int64."""
        last = int(np.searchsorted(self.firsts, samples, side="right")) - 1
        return self._before[last] + self.mixtures[last].drawn(samples - self.firsts[last])


def phased(
    phases: Sequence[MixPhase], weights: Sequence[float], sequence_length: int
) -> PhasedMixture:
    """Returns the mixture of a run whose phases end with these weights.

    A phase ends with the sample that completes its tokens. Raises ConfigError if a weight is too
    small to ever be drawn.
    """
    firsts: list[int] = []
    mixtures: list[Mixture] = []
    first = 0
    following = [*(phase.weights for phase in phases), weights][1:]
    for phase, after in zip(phases, following, strict=True):
        last = -(-phase.tokens // sequence_length)
        if phase.change == "linear":
            pieces = [*_linear(shares_of(phase.weights), shares_of(after), first, last)]
        else:
            pieces = [(first, mix(phase.weights))]
        firsts += [begin for begin, _ in pieces]
        mixtures += [mixture for _, mixture in pieces]
        first = last
    return PhasedMixture((*firsts, first), (*mixtures, mix(weights)))


def _linear(
    before: Sequence[Fraction], after: Sequence[Fraction], first: int, last: int
) -> Iterator[tuple[int, Mixture]]:
    """Yields (first sample, mixture) of the pieces in which one list of shares becomes another."""
    for piece in range(PIECES):
        begin, end = (first + (last - first) * at // PIECES for at in (piece, piece + 1))
        if begin < end:
            way = Fraction(2 * piece + 1, 2 * PIECES)
            middle = [a + way * (b - a) for a, b in zip(before, after, strict=True)]
            yield begin, Mixture(nearest(middle, PARTS))
