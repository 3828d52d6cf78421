"""Maps a parameter that is made from one tensor, of which files hold the rows in several."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdtrain.interop.pieces import Index, Mapped, Shape


@dataclass(frozen=True)
class JoinedRows:
    """A parameter of one layer made by `of_whole` from the joined rows of several tensors.

    `rows`: how many each tensor has. transformers 5.24 writes equal parts, whatever their rows
    belong to, and reads them joined: so do we, and write the tensors with their own rows.
    """

    of_whole: Mapped
    rows: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return self.of_whole.shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self._cut(self.rows)

    @property
    def other_shapes(self) -> tuple[Shape, ...]:
        """The shapes of equal parts, of which the last one may be smaller."""
        total, count = sum(self.rows), len(self.rows)
        size = -(-total // count)
        return self._cut([min(size, total - size * number) for number in range(count)])

    def _cut(self, rows: Sequence[int]) -> tuple[Shape, ...]:
        (whole,) = self.of_whole.shapes
        return tuple((count, *whole[1:]) for count in rows)

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter, made of the tensors of the file."""
        return self.of_whole.read([np.concatenate(list(tensors))], index)

    def write(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Returns the tensors of the file, made of the parameter."""
        (whole,) = self.of_whole.write(parameter)
        assert isinstance(whole, np.ndarray), "tensors of one parameter each"
        return np.split(whole, np.cumsum(self.rows)[:-1])
