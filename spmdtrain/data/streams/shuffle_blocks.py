"""Makes blocks of a stream: consecutive windows of tokens that are held and shuffled together.

The windows of an epoch are numbered as in `TrainStream` (batches.py) and cut into blocks of equal
size, the last of an epoch being smaller. A block is made by reading on from the previous one, or
from the nearest place that the ledger knows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import PHASE
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.shuffle import random_bits
from spmdtrain.data.streams.shard_reader import DocumentTokens, ShardReader

HELD = 2  # blocks: a batch may extend across the end of one


@dataclass(frozen=True)
class WindowBlock:
    """The tokens of `windows` windows, the first of which starts at offset 0 of `corpus`."""

    corpus: Corpus
    windows: int


class WindowBlocks:
    """The blocks of a stream, made on demand; the last two are held.

    A block has at most `size` windows of `length` tokens. With a `seed`, the first window of each
    epoch starts at a random phase.
    """

    def __init__(self, reader: ShardReader, empty: Corpus, length: int, size: int):
        """Prepares to read.

        `empty` is a corpus without tokens that describes those of the stream.
        """
        self._reader = reader
        self._empty = empty
        self._length = length
        self._size = size
        # As in TrainStream: with a phase, the largest one leaves room for as many windows.
        self._reserve = 1 if reader.seed is None else length
        self._held: dict[tuple[int, int], WindowBlock | None] = {}
        self._pieces: Iterator[DocumentTokens] | None = None
        self._read: list[DocumentTokens] = []  # of one epoch, the latest last

    def find(self, index: int) -> tuple[WindowBlock, tuple[int, int], int]:
        """Returns the block of a sample, the block's (epoch, number), and the window within it.

        Raises DataError if the shards cannot be read, or hold less than one window.
        """
        while True:
            total = self._reader.ledger.total
            if total is None:
                epoch, window = 0, index
            else:
                epoch, window = divmod(index, self._windows(total))
            number, within = divmod(window, self._size)
            block = self._block(epoch, number)
            if block is not None and within < block.windows:
                return block, (epoch, number), within
            assert total is None, "the end of an epoch is known once, and for all of them"

    def _windows(self, total: int) -> int:
        """Returns the windows of an epoch of `total` tokens."""
        windows = (total - self._reserve) // self._length
        if windows < 1:
            raise DataError(
                "the files are too short for a single sequence",
                asked=f"train.sequence_length={self._length}",
                found=f"{total} tokens",
                fix="more files, or a smaller train.sequence_length",
            )
        return windows

    def _block(self, epoch: int, number: int) -> WindowBlock | None:
        """Returns a block; None if the epoch ends before it."""
        place = (epoch, number)
        if place not in self._held:
            made = self._make(epoch, number)
            self._held = dict(list(self._held.items())[1 - HELD :]) | {place: made}
        return self._held[place]

    def _make(self, epoch: int, number: int) -> WindowBlock | None:
        start = self._phase(epoch) + number * self._size * self._length
        last = self._size * self._length  # the token after the last window, from `start`
        # If the epoch has this many tokens, the block is a full one.
        enough = (number + 1) * self._size * self._length + self._reserve
        is_end = self._read_to(epoch, start, max(start + last + 1, enough))
        windows = self._size
        if is_end:
            windows = min(self._windows(self._end()) - number * self._size, self._size)
            if windows < 1:
                return None
        corpus = self._taken(start, start + windows * self._length + 1)
        return WindowBlock(corpus, windows)

    def _phase(self, epoch: int) -> int:
        if self._reader.seed is None:
            return 0
        bits = int(random_bits(self._reader.seed, PHASE, epoch)[0])
        return bits % self._length

    def _end(self) -> int:
        """Returns the offset after the last token that has been read."""
        return self._read[-1].at + len(self._read[-1].ids) if self._read else 0

    def _read_to(self, epoch: int, start: int, stop: int) -> bool:
        """Reads the tokens from `start` on, up to `stop` or the end of the epoch.

        Returns whether the epoch has ended.
        """
        oldest = self._read[0] if self._read else None
        if self._pieces is None or oldest is None or oldest.epoch != epoch or oldest.at > start:
            follows = oldest is not None and oldest.epoch + 1 == epoch and self._read[-1].is_end
            if not follows:
                self._pieces = self._reader.pieces(epoch, start)
            self._read = []
        assert self._pieces is not None
        while not (self._read and self._read[-1].is_end) and self._end() < stop:
            self._read.append(next(self._pieces))
            while len(self._read) > 1 and self._read[1].at <= start:
                del self._read[0]
        return self._read[-1].is_end

    def _taken(self, start: int, stop: int) -> Corpus:
        """Returns the tokens start to stop - 1 of those read, as a separate corpus."""
        ids = np.concatenate([piece.ids for piece in self._read])
        first = self._read[0].at
        starts = np.concatenate([piece.at + piece.starts for piece in self._read])
        inside = starts[(starts > start) & (starts < stop)] - start
        return replace(
            self._empty,
            tokens=ids[start - first : stop - first].copy(),
            document_starts=np.concatenate([[0], inside]).astype(np.int64),
        )
