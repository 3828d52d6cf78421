"""Defines further arrays of a batch that are stored by token, beside a corpus."""

from typing import Protocol

import numpy as np


class TokenArrays(Protocol):
    """The arrays beside the tokens of a corpus. n: sequences or windows, T: tokens."""

    @property
    def described(self) -> str:
        """A line about them."""
        ...

    def blank(self, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns the entries of a batch for tokens [n, T] that have none."""
        ...

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the entries of a sequence whose inputs have the offsets start to stop - 1."""
        ...

    def of_windows(self, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Returns the entries of windows of `length` inputs that begin at `starts` [n]."""
        ...
