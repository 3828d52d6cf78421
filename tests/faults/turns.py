"""The turns of a case: how often it breaks something, and a way to end before that."""

import math
import time
from collections.abc import Iterator
from typing import Any

Figures = dict[str, Any]


class Turns:
    """Counts from 0 up to `times`, and stops sooner once `end` is called or `seconds` are over.

    One turn is always taken. A case ends as usual after it, with the figures of the turns that it
    has `taken`.
    """

    def __init__(self, times: int, seconds: float = math.inf):
        self.taken = 0
        self._times = times
        self._deadline = time.monotonic() + seconds
        self._ended = False

    def __iter__(self) -> Iterator[int]:
        while self.taken < self._times and (self.taken == 0 or not self._over()):
            yield self.taken
            self.taken += 1

    def end(self, *_: Any) -> None:
        """Lets no further turn begin; takes what a signal handler is given."""
        self._ended = True

    def _over(self) -> bool:
        return self._ended or time.monotonic() > self._deadline
