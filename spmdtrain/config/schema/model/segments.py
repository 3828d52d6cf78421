"""Divides layers that no round repeats as a whole into segments that repeat rounds of their own."""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


@lru_cache(maxsize=100)
def shortest_segments(layers: tuple[Item, ...]) -> tuple[tuple[tuple[Item, ...], int], ...]:
    """Returns (pattern, rounds) of segments that give `layers` one after another.

    Their patterns have as few layers as possible in all, and of those they are the fewest segments.
    """
    # By the number of layers that are divided: (layers of patterns, segments, where the last
    # segment starts, the layers of its pattern).
    best = [(0, 0, 0, 0)]
    for stop in range(1, len(layers) + 1):
        best.append(
            min(
                (best[start][0] + size, best[start][1] + 1, start, size)
                for size in range(1, stop + 1)
                for start in _starts(layers, stop, size)
            )
        )
    segments = []
    stop = len(layers)
    while stop:
        _, _, start, size = best[stop]
        segments.append((layers[start : start + size], (stop - start) // size))
        stop = start
    return tuple(reversed(segments))


def _starts(layers: Sequence[Item], stop: int, size: int) -> list[int]:
    """Returns where whole rounds of the last `size` layers before `stop` may start."""
    pattern = layers[stop - size : stop]
    starts = [stop - size]
    while starts[-1] >= size and layers[starts[-1] - size : starts[-1]] == pattern:
        starts.append(starts[-1] - size)
    return starts
