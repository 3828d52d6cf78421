"""Maps the tensors of Mamba-2 to our parameters, and back.

In files one matrix has the rows of all gates z, of all values x, of all keys B, of all queries C,
and of the time of each head; and one convolution has the channels of x, B and C. Ours are two
parameters each: what belongs to a head, and what a group shares, which `tensor` splits otherwise.
Each of them is made from rows of the same tensor.

Letters as in pieces.py, and those of models/layers/mixers: h groups, r heads of each, v channels of
a head, n those of keys or queries, w taps.
"""

from collections.abc import Sequence
from typing import NamedTuple

from spmdtrain.interop.pieces import Mapped, Piece, Shape, Sizes


class _Part(NamedTuple):
    """A part of a tensor: rows that fill so many places of the last dim of a parameter's heads."""

    first_row: int
    width: int


def of_heads(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes rows z, x and dt of [2 h r v + 2 h n + h r, E] as [E, h, r, 2 v + 1]."""
    embed, groups, group, width = shape
    inner, shared = sizes.state_width, 2 * groups * sizes.state
    parts = (_Part(0, width // 2), _Part(inner, width // 2), _Part(2 * inner + shared, 1))
    return _projection(parts, (groups, group), embed, 2 * inner + shared + groups * group)


def of_groups(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes rows B and C of [2 h r v + 2 h n + h r, E] as [E, h, 2 n]."""
    embed, groups, width = shape
    inner, half = 2 * sizes.state_width, width // 2
    parts = (_Part(inner, half), _Part(inner + groups * half, half))
    return _projection(parts, (groups,), embed, inner + groups * width + sizes.state_heads)


def taps_of_heads(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes channels x of [h r v + 2 h n, 1, w] as [h, r, v, w]."""
    *heads, width, taps = shape
    channels = sizes.state_width + 2 * heads[0] * sizes.state
    return _channels((_Part(0, width),), heads, (channels, 1, taps), shape)


def taps_of_groups(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes channels B and C of [h r v + 2 h n, 1, w] as [h, 2 n, w]."""
    groups, width, taps = shape
    return _channels(_shared(sizes, shape), (groups,), (_all(sizes, shape), 1, taps), shape)


def bias_of_heads(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes channels x of [h r v + 2 h n] as [h, r, v]."""
    *heads, width = shape
    channels = sizes.state_width + 2 * heads[0] * sizes.state
    return _channels((_Part(0, width),), heads, (channels,), shape)


def bias_of_groups(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes channels B and C of [h r v + 2 h n] as [h, 2 n]."""
    return _channels(_shared(sizes, shape), shape[:1], (_all(sizes, shape),), shape)


def _shared(sizes: Sizes, shape: Shape) -> tuple[_Part, _Part]:
    """Returns the channels of keys and of queries, behind those of values; shape: [h, 2 n, ...]."""
    half = shape[1] // 2
    return _Part(sizes.state_width, half), _Part(sizes.state_width + shape[0] * half, half)


def _all(sizes: Sizes, shape: Shape) -> int:
    """Counts the channels of the convolution; shape: [h, 2 n, ...]."""
    return sizes.state_width + shape[0] * shape[1]


def _projection(parts: Sequence[_Part], heads: Shape, embed: int, rows: int) -> Mapped:
    """Returns the mapping of parts of a tensor [rows, E] to [E, *heads, places]."""
    pieces, place, dims = [], 0, len(heads)
    count = _product(heads)
    for first, width in parts:
        cut = slice(first, first + count * width)
        order = (dims + 1, *range(dims + 1))
        box = (*heads, width, embed)
        pieces.append(Piece(0, 0, cut, box, order, dims + 1, slice(place, place + width)))
        place += width
    shape = (embed, *heads, place)
    return Mapped(shape, shape, ((rows, embed),), tuple(pieces))


def _channels(parts: Sequence[_Part], heads: Sequence[int], file: Shape, shape: Shape) -> Mapped:
    """Returns the mapping of parts of a tensor [channels, ...] to [*heads, places, ...]."""
    pieces, place, dims = [], 0, len(heads)
    for first, width in parts:
        cut = slice(first, first + _product(heads) * width)
        box = (*heads, width, *shape[dims + 1 :])
        places = slice(place, place + width)
        pieces.append(Piece(0, 0, cut, box, tuple(range(len(box))), dims, places))
        place += width
    return Mapped(shape, shape, (file,), tuple(pieces))


def _product(heads: Sequence[int]) -> int:
    count = 1
    for size in heads:
        count *= size
    return count
