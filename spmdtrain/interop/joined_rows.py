"""Maps a parameter that is made from one tensor, of which files hold the rows in several."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdtrain.interop.pieces import Index, Mapped, Shape


@dataclass(frozen=True)
class JoinedRows:
    """A parameter of one layer made by `of_whole` from the joined rows of several tensors.

    `rows`: how many each tensor has. transformers 5.24 writes equal parts, whatever their rows
    belong to, or one tensor of all, which then stands for each: we read them joined, and write the
    tensors with their own rows.
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
    def other_shapes(self) -> Sequence[tuple[Shape, ...]]:
        """The shapes of equal parts, of which the last one may be smaller, and of the whole."""
        total, count = sum(self.rows), len(self.rows)
        size = -(-total // count)
        equal = [min(size, total - size * number) for number in range(count)]
        return self._cut(equal), self._cut([total] * count)

    def _cut(self, rows: Sequence[int]) -> tuple[Shape, ...]:
        (whole,) = self.of_whole.shapes
        return tuple((count, *whole[1:]) for count in rows)

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter, made of the tensors of the file."""
        is_whole = len(tensors[0]) == sum(self.rows)
        whole = tensors[0] if is_whole else np.concatenate(list(tensors))
        return self.of_whole.read([whole], index)

    def write(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Returns the tensors of the file, made of the parameter."""
        (whole,) = self.of_whole.write(parameter)
        assert isinstance(whole, np.ndarray), "tensors of one parameter each"
        return np.split(whole, np.cumsum(self.rows)[:-1])
