"""Packs whole documents into windows: no document that fits a window is cut.

A *piece* is a document, or a part of one that is too long for a window. A piece of n + 1 tokens
takes n *positions*: all its tokens but the last are inputs, all but the first are targets. The
parts of a long document overlap by one token, so every token but a document's first is a target
exactly once.

Windows are filled by best-fit decreasing (Ding et al., 2024, arXiv:2404.10830): the longest piece
first, each into the fullest window that has room for it. It packs at least as well as first-fit.
All pieces of one length are placed together, so apart from sorting, the work grows with the number
of lengths, not of documents.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import ORDER, Batch, Range
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.indices import check_range, sample_indices
from spmdtrain.data.pairs import fill_pair, whole_pairs
from spmdtrain.data.shuffle import permute, random_bits
from spmdtrain.data.token_arrays import TokenArrays


@dataclass(frozen=True)
class Packing:
    """The assignment of pieces to windows."""

    starts: np.ndarray  # [pieces] int64, the offset of each piece's first token
    sizes: np.ndarray  # [pieces] int64, positions of each
    bounds: (
        np.ndarray
    )  # [windows + 1] int64: window w holds the pieces bounds[w] to bounds[w + 1] - 1

    @property
    def windows(self) -> int:
        return len(self.bounds) - 1


def pack_documents(document_starts: np.ndarray, span: Range, length: int) -> Packing:
    """Returns the packing of a range's documents into windows of `length` positions.

    Windows are in the order of their first documents. Raises DataError if every document is shorter
    than two tokens.
    """
    starts, sizes = _pieces(document_starts, span, length)
    if not len(starts):
        raise DataError("no document has two tokens", fix="--set data.packing=stream")
    window = _best_fit(sizes, length)
    by_window = np.lexsort((starts, window))  # by window, then by place in the corpus
    starts = starts[by_window]
    sizes = sizes[by_window]
    counts = np.bincount(window)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    # Order the windows by their first pieces.
    order = np.argsort(starts[bounds[:-1]], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    by_rank = np.argsort(np.repeat(rank, counts), kind="stable")
    new_bounds = np.concatenate([[0], np.cumsum(counts[order])])
    return Packing(starts[by_rank], sizes[by_rank], new_bounds)


def _pieces(document_starts: np.ndarray, span: Range, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first offset and the positions of each piece in a range of tokens."""
    first = np.searchsorted(document_starts, span.start, side="right") - 1
    last = np.searchsorted(document_starts, span.stop)
    begins = np.maximum(document_starts[first:last], span.start)
    ends = np.append(begins[1:], span.stop)
    positions = ends - begins - 1
    begins = begins[positions > 0]
    positions = positions[positions > 0]
    parts = -(-positions // length)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(begins, parts) + part * length
    sizes = np.minimum(np.repeat(positions, parts) - part * length, length)
    return starts, sizes


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Returns the number of the window that each piece goes to."""
    window = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    bounds = np.flatnonzero(np.diff(sizes[by_size], prepend=0, append=0))
    room: dict[int, np.ndarray] = {}  # free positions -> windows with that many
    rooms: list[int] = []  # the keys of `room`, rising
    opened = 0

    def put_back(free: int, windows: np.ndarray) -> None:
        if free == 0 or not len(windows):
            return
        if free in room:
            room[free] = np.concatenate([room[free], windows])
        else:
            room[free] = windows
            insort(rooms, free)

    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        pieces = by_size[begin:end]
        size = int(sizes[pieces[0]])
        while len(pieces):
            at = bisect_left(rooms, size)
            if at == len(rooms):  # no window has room: the rest go to new ones
                per_window = length // size
                count = -(-len(pieces) // per_window)
                window[pieces] = opened + np.arange(len(pieces)) // per_window
                in_last = len(pieces) - (count - 1) * per_window
                new = np.arange(opened, opened + count)
                put_back(length - per_window * size, new[:-1])
                put_back(length - in_last * size, new[-1:])
                opened += count
                break
            free = rooms.pop(at)
            windows = room.pop(free)
            count = min(len(windows), len(pieces))
            window[pieces[:count]] = windows[:count]
            put_back(free, windows[count:])
            put_back(free - size, windows[:count])
            pieces = pieces[count:]
    return window


class PackedWindows:
    """One pass over the documents of a range of tokens, in packed windows.

    The rest of a window is padded with id 0 and mask 0, as a separate segment.
    """

    def __init__(self, corpus: Corpus, span: Range, length: int, beside: TokenArrays | None = None):
        check_range(*span, len(corpus.tokens), length)
        self._corpus = corpus
        self._length = length
        self._beside = beside
        if corpus.has_pairs:
            span = whole_pairs(corpus, span, length)
        self._packing = pack_documents(corpus.document_starts, span, length)
        self.windows = self._packing.windows
        self.pairs = len(self._packing.starts) if corpus.has_pairs else 0

    def samples(self, indices: np.ndarray) -> Batch:
        """Returns the batch of these windows; windows past the last are all padding."""
        indices = sample_indices(indices)
        shape = (len(indices), self._length)
        batch = {
            "tokens": np.zeros(shape, np.int32),
            "targets": np.zeros(shape, np.int32),
            "mask": np.zeros(shape, np.float32),
            "sample": indices.astype(np.uint32),
            "segment_ids": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
        }
        if self._corpus.references is not None:
            batch["reference"] = np.zeros(shape, np.float32)
        if self._beside is not None:
            batch |= self._beside.blank(shape)
        windows = [self.pieces(window) for window in indices.tolist()]
        for pieces in windows:
            for start, size in pieces:
                self._corpus.will_need(start, start + size + 1)
        for row, pieces in enumerate(windows):
            self._fill(batch, row, pieces)
        return batch

    def pieces(self, window: int) -> list[tuple[int, int]]:
        """Returns (offset of the first token, positions) of each piece in a window."""
        if window >= self._packing.windows:
            return []
        inside = slice(*self._packing.bounds[window : window + 2].tolist())
        starts = self._packing.starts[inside].tolist()
        sizes = self._packing.sizes[inside].tolist()
        return list(zip(starts, sizes, strict=True))

    def _fill(self, batch: Batch, row: int, pieces: list[tuple[int, int]]) -> None:
        at = 0
        for segment, (start, size) in enumerate(pieces):
            ids = self._corpus.read(start, start + size + 1)
            place = slice(at, at + size)
            batch["tokens"][row, place] = ids[:-1]
            batch["targets"][row, place] = ids[1:]
            batch["mask"][row, place] = self._corpus.counts(start + 1, start + size + 1)
            batch["segment_ids"][row, place] = segment
            batch["positions"][row, place] = np.arange(size)
            if self._beside is not None:
                for name, values in self._beside.read(start, start + size).items():
                    batch[name][row, place] = values
            if self._corpus.has_pairs:
                fill_pair(batch, row, at, segment, self._corpus, start, size)
            at += size
        batch["segment_ids"][row, at:] = len(pieces) * (1 + self._corpus.has_pairs)
        batch["positions"][row, at:] = np.arange(self._length - at)


class PackedStream:
    """An endless stream of training samples of packed windows: one epoch after another.

    The windows are the same in each epoch. With `shuffle`, each epoch visits them in its own order.
    """

    def __init__(
        self,
        corpus: Corpus,
        span: Range,
        length: int,
        *,
        seed: int,
        shuffle: bool,
        beside: TokenArrays | None = None,
    ):
        self._windows = PackedWindows(corpus, span, length, beside)
        self._seed = seed
        self._shuffle = shuffle

    @property
    def windows(self) -> int:
        """The number of windows in an epoch."""
        return self._windows.windows

    def samples(self, indices: np.ndarray) -> Batch:
        """Returns the batch of these global sample indices; earlier calls do not matter."""
        indices = sample_indices(indices)
        count = self._windows.windows
        epoch, window = np.divmod(indices, count)
        if self._shuffle:
            window = permute(window, count, random_bits(self._seed, ORDER, epoch))
        return self._windows.samples(window) | {"sample": indices.astype(np.uint32)}
