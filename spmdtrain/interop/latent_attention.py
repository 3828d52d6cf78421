"""Maps the tensors of latent attention to our parameters, and back.

In files, rotated channels that form a pair are adjacent; ours are half a head apart, as in all
other models. The scores are the same, because queries and keys are reordered alike.

Letters as in pieces.py, and those of models/layers/attention/latent.py: n the channels that are not
rotated, h those that are, r and c the widths of the latents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spmdtrain.interop.pieces import Index, Mapped, Shape, Sizes, heads_first, transpose


@dataclass(frozen=True)
class Reordered:
    """A parameter of one layer that is made from whole tensors with their rows in another order.

    `of_file` makes it from tensors of the shapes `shapes`, and `to_file` makes them from it.
    """

    shape: Shape
    shapes: tuple[Shape, ...]
    of_file: Callable[[Sequence[np.ndarray]], np.ndarray]
    to_file: Callable[[np.ndarray], list[np.ndarray]]

    def read(self, tensors: Sequence[np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of the parameter, made of the tensors of the file."""
        return self.of_file(list(tensors))[index]

    def write(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Returns the tensors of the file, made of the parameter."""
        return self.to_file(parameter)


def _order(turned: int, *, to_file: bool) -> np.ndarray:
    """Returns the channel at each place: i and i + h / 2 for the pair 2 i, 2 i + 1."""
    halves = np.concatenate((np.arange(0, turned, 2), np.arange(1, turned, 2)))
    return np.argsort(halves) if to_file else halves


def down(sizes: Sizes, shape: Shape) -> Reordered:
    """Takes [r, E] and [c + h, E] as [E, r + c + h]; only the second if r is 0."""
    embed, width = shape
    rank, turned = sizes.query_rank, sizes.rope_dim
    shapes = ((rank, embed),) * (rank > 0) + ((width - rank, embed),)

    def of_file(tensors: Sequence[np.ndarray]) -> np.ndarray:
        latents = tensors[-1]
        last = latents[-turned:][_order(turned, to_file=False)]
        return np.concatenate((*tensors[:-1], latents[:-turned], last)).T

    def to_file(parameter: np.ndarray) -> list[np.ndarray]:
        rows = parameter.T
        last = rows[-turned:][_order(turned, to_file=True)]
        latents = np.concatenate((rows[rank:-turned], last))
        return [rows[:rank], latents] if rank else [latents]

    return Reordered(shape, shapes, of_file, to_file)


def queries(sizes: Sizes, shape: Shape) -> Reordered:
    """Takes [H (n + h), r] as [r, H, n + h]."""
    inputs, heads, width = shape
    turned = sizes.rope_dim

    def ordered(rows: np.ndarray, *, to_file: bool) -> np.ndarray:
        """Returns rows [H, n + h, r] with the last h of each head in the other order."""
        last = rows[:, -turned:][:, _order(turned, to_file=to_file)]
        return np.concatenate((rows[:, :-turned], last), 1)

    def of_file(tensors: Sequence[np.ndarray]) -> np.ndarray:
        rows = tensors[0].reshape(heads, width, inputs)
        return ordered(rows, to_file=False).transpose(2, 0, 1)

    def to_file(parameter: np.ndarray) -> list[np.ndarray]:
        rows = ordered(parameter.transpose(1, 2, 0), to_file=True)
        return [rows.reshape(heads * width, inputs)]

    return Reordered(shape, ((heads * width, inputs),), of_file, to_file)


def keys_and_values(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes [H (n + value), c] as [c, H, n + value]."""
    return heads_first(sizes, shape)


def joined(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes [E, 2 E] of a further token; the columns are those of the token and of the stream."""
    _, embed, _ = shape
    as_matrix = transpose(sizes, (2 * embed, embed))
    return Mapped(shape, as_matrix.view, as_matrix.shapes, as_matrix.pieces)
