"""Maps queries and keys whose files have channels that turn as a pair next to each other.

Ours are half a head apart, as in all other models. The scores are the same, because queries and
keys are reordered alike; values stay. Letters as in pieces.py.
"""

from spmdtrain.interop.pieces import Mapped, Piece, Shape, Sizes

Rows = tuple[int, ...]


def qkv(sizes: Sizes, shape: Shape) -> Mapped:  # noqa: ARG001 - as the other rules
    """Takes three tensors [H d, E], [K d, E], [K d, E] as [E, K, G + 2, d]."""
    embed, heads, slots, dim = shape
    pieces = tuple(
        Piece(number, 0, slice(0, heads * count * dim), (*rows, embed), order, 2, places)
        for number, (count, places, rows, order) in enumerate(
            (count, places, _rows(heads, count, dim, turns), (4, 0, 1, *_pair(turns)))
            for count, places, turns in _slots(slots)
        )
    )
    view = (embed, heads, slots, 2, dim // 2)
    shapes = tuple((heads * count * dim, embed) for count, *_ in _slots(slots))
    return Mapped(shape, view, shapes, pieces)


def qkv_bias(sizes: Sizes, shape: Shape) -> Mapped:
    """Takes three biases as [K (G + 2) d]."""
    heads, dim, slots = sizes.kv_heads, sizes.head_dim, sizes.group + 2
    pieces = tuple(
        Piece(
            number,
            0,
            slice(0, heads * count * dim),
            _rows(heads, count, dim, turns),
            (0, 1, *_pair(turns)),
            1,
            places,
        )
        for number, (count, places, turns) in enumerate(_slots(slots))
    )
    shapes = tuple((heads * count * dim,) for count, *_ in _slots(slots))
    return Mapped(shape, (heads, slots, 2, dim // 2), shapes, pieces)


def _slots(slots: int) -> tuple[tuple[int, slice, bool], ...]:
    """Returns (count, places, is turned) of queries, keys and values."""
    group = slots - 2
    return (
        (group, slice(0, group), True),
        (1, slice(group, group + 1), True),
        (1, slice(group + 1, slots), False),
    )


def _rows(heads: int, count: int, dim: int, turns: bool) -> Rows:
    """Returns how the rows of a tensor split: channels of pairs, or of halves."""
    return (heads, count, dim // 2, 2) if turns else (heads, count, 2, dim // 2)


def _pair(turns: bool) -> tuple[int, int]:
    """Returns the order of the dims of halves and pairs in our parameter."""
    return (3, 2) if turns else (2, 3)
