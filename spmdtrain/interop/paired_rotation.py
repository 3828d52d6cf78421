"""Maps queries and keys whose files have channels that turn as a pair next to each other.

Ours are half of the turning channels apart, as in all other models. The scores are the same,
because queries and keys are reordered alike; values, and channels that do not turn, stay. Letters
as in pieces.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdtrain.interop import pieces
from spmdtrain.interop.pieces import Index, Mapped, Shape, Sizes, Written

QUERIES_AND_KEYS = 2  # the first of the tensors; the third has values


@dataclass(frozen=True)
class Paired:
    """A parameter of one layer, made by `halves` once the rows of its tensors are in order.

    Of the `dim` rows of a head the first `turned` turn: in files 2 i with 2 i + 1, in ours i with
    i + turned / 2.
    """

    halves: Mapped
    dim: int
    turned: int

    @property
    def shape(self) -> Shape:
        return self.halves.shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.halves.shapes

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter, made of the tensors of the file."""
        return self.halves.read(self._ordered(tensors, self._order()), index)

    def write(self, parameter: np.ndarray) -> list[Written]:
        """Returns the tensors of the file, made of the parameter."""
        written = self.halves.write(parameter)
        tensors = [tensor for tensor in written if isinstance(tensor, np.ndarray)]  # all are whole
        return [*self._ordered(tensors, np.argsort(self._order()))]

    def _order(self) -> np.ndarray:
        """Returns the channel of the file at each of ours."""
        channels = np.arange(self.dim)
        turned = channels[: self.turned]
        return np.concatenate((turned[::2], turned[1::2], channels[self.turned :]))

    def _ordered(self, tensors: Sequence[np.ndarray], order: np.ndarray) -> list[np.ndarray]:
        """Returns the tensors with the rows of each head of queries and keys in another order."""
        turning = [
            tensor.reshape(-1, self.dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)
            for tensor in tensors[:QUERIES_AND_KEYS]
        ]
        return [*turning, *tensors[QUERIES_AND_KEYS:]]


def qkv(sizes: Sizes, shape: Shape) -> Paired:
    """Takes three tensors [H d, E], [K d, E], [K d, E] as [E, K, G + 2, d]."""
    return Paired(pieces.qkv(sizes, shape), sizes.head_dim, sizes.rope_dim)


def qkv_bias(sizes: Sizes, shape: Shape) -> Paired:
    """Takes three biases as [K (G + 2) d]."""
    return Paired(pieces.qkv_bias(sizes, shape), sizes.head_dim, sizes.rope_dim)
