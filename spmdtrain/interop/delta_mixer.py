"""Maps the tensors of the gated delta rule to our parameters, and back.

Most files have the rows of all queries, then of all keys, then of all values. Ours are grouped by
key head, so that `tensor` splits them with the value heads that share a key.

Letters as in pieces.py, and those of models/layers/mixers: h key heads, r value heads of each, k
and v the channels of keys and values, w taps.
"""

from collections.abc import Sequence

from spmdtrain.interop.joined_rows import JoinedRows
from spmdtrain.interop.pieces import Mapped, Piece, Shape, Sizes


def mixed(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes queries, keys and values [h (2 k + r v), E] and gates [h r v, E] as [E, h, n]."""
    of_values = (shape[2] - 2 * sizes.key_dim) // 2
    of_tensors = ((sizes.key_dim, sizes.key_dim, of_values), (of_values,))
    return _by_head(of_tensors, shape)


def mixed_apart(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes queries and keys [h k, E], values and gates [h r v, E] as [E, h, n]."""
    of_values = (shape[2] - 2 * sizes.key_dim) // 2
    return _by_head(((sizes.key_dim,), (sizes.key_dim,), (of_values,), (of_values,)), shape)


def without_gates(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes queries and keys [h k, E] and values [h r v, E] as [E, h, n]."""
    of_values = shape[2] - 2 * sizes.key_dim
    return _by_head(((sizes.key_dim,), (sizes.key_dim,), (of_values,)), shape)


def log_decays(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes the logarithms [1, 1, h, 1] of Kimi's decays as a vector."""
    (heads,) = shape
    whole = Piece(0, 0, slice(0, 1), shape, (0,), 0, slice(0, heads))
    return Mapped(shape, shape, ((1, 1, heads, 1),), (whole,))


def rates(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes the rates [h r, E] and the decays [h r, E] as [E, h, 2 r]."""
    group = shape[2] // 2
    return _by_head(((group,), (group,)), shape)


def taps(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes the taps [h (2 k + r v), 1, w] of queries, keys and values as [h, n, w]."""
    heads, width, count = shape
    pieces, row, place = [], 0, 0
    for size in (sizes.key_dim, sizes.key_dim, width - 2 * sizes.key_dim):
        rows, places = slice(row, row + heads * size), slice(place, place + size)
        pieces.append(Piece(0, 0, rows, (heads, size, count), (0, 1, 2), 1, places))
        row, place = rows.stop, places.stop
    return Mapped(shape, shape, ((heads * width, 1, count),), tuple(pieces))


def taps_apart(sizes: Sizes, shape: Shape) -> JoinedRows:
    """Takes the taps of queries [h k, 1, w], of keys, and of values [h r v, 1, w] as [h, n, w]."""
    heads, width, _ = shape
    keys = heads * sizes.key_dim
    return JoinedRows(taps(sizes, shape), (keys, keys, heads * width - 2 * keys))


def _by_head(of_tensors: Sequence[Sequence[int]], shape: Shape) -> Mapped:
    """Returns the mapping of tensors [rows, E] to [E, h, n].

    `of_tensors`: for each tensor the widths, in a head, of the parts that its rows have one after
    another, each of all heads. In ours all parts of a head lie side by side.
    """
    embed, heads, _ = shape
    pieces, shapes, place = [], [], 0
    for source, widths in enumerate(of_tensors):
        row = 0
        for width in widths:
            rows, places = slice(row, row + heads * width), slice(place, place + width)
            pieces.append(Piece(source, 0, rows, (heads, width, embed), (2, 0, 1), 2, places))
            row, place = rows.stop, places.stop
        shapes.append((row, embed))
    return Mapped(shape, shape, tuple(shapes), tuple(pieces))
