"""Encodes a long text window by window, in constant memory.

Windows overlap. If two of them give the same tokens over the middle half of their overlap, the text
has the first one's tokens up to there and the second one's from there on, since tokens depend only
on nearby characters. If not, the window grows.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spmdtrain.data.tokenizers.offsets import Encoding

LONGEST = 2**21  # characters encoded in one call
SHARED = 2**14  # characters of overlap


def grouped(texts: Sequence[str], longest: int) -> Iterator[list[str]]:
    """Yields the texts in order, in groups of at most `longest` characters or one text."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > longest:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def encode_in_windows(
    text: str,
    encode: Callable[[str], Encoding],
    window: int = LONGEST // 2,
    shared: int = SHARED,
) -> np.ndarray:
    """Returns the ids of a text, int32 [tokens]. `window` and `shared` are in characters."""
    parts = []
    begin = 0  # of the window encoded in `held`
    length = min(window, len(text))
    held = encode(text[:length])
    first = 0  # token of it not yet in `parts`
    while begin + length < len(text):
        start = begin + length - shared  # of the next window
        following = encode(text[start : start + window])
        seam = _seam(held, following, start - begin, shared, first)
        if seam is None:
            length = min(2 * length, len(text) - begin)
            longer = encode(text[begin : begin + length])
            if not np.array_equal(longer.ids[:first], held.ids[:first]):
                return encode(text).ids  # later text changes earlier tokens
            held = longer
            continue
        stop, go_on = seam
        parts.append(held.ids[first:stop])
        begin, length = start, min(window, len(text) - start)
        held, first = following, go_on
    return np.concatenate([*parts, held.ids[first:]])


def _seam(
    left: Encoding, right: Encoding, shift: int, shared: int, first: int
) -> tuple[int, int] | None:
    """Returns a token of `left` and the same one in `right` before which the text may be cut.

    The right window begins at the character `shift` of the left one. None: they disagree.
    """
    low, middle, high = shared // 4, shared // 2, shared - shared // 4
    rows = []
    for encoding, offset in ((left, shift), (right, 0)):
        starts, ends = encoding.starts - offset, encoding.ends - offset
        (inside,) = np.nonzero((starts >= low) & (ends <= high))
        if not len(inside) or inside[-1] - inside[0] + 1 != len(inside):
            return None
        rows.append((inside[0], np.stack([encoding.ids[inside], starts[inside], ends[inside]])))
    (left_first, in_left), (right_first, in_right) = rows
    if not np.array_equal(in_left, in_right):
        return None
    # Never cut within a character that spans several tokens.
    (clean,) = np.nonzero((in_left[1, 1:] >= middle) & (in_left[1, 1:] >= in_left[2, :-1]))
    if not len(clean) or left_first + clean[0] + 1 < first:
        return None
    return int(left_first + clean[0] + 1), int(right_first + clean[0] + 1)
