"""Batches as pure functions of the sample index, for training and for evaluation, and a thread that makes them early.

A *window* is `sequence_length + 1` consecutive tokens: its first `sequence_length` are the inputs, its last the
targets. A *sample* is one window; the global sample index counts the samples of a whole run, so (seed, index) is all
the position that data has: it does not depend on how many processes share a batch.

A batch of n samples is a dict of arrays with n rows:

    tokens   [n, T] int32     inputs
    targets  [n, T] int32     the token after each input
    mask     [n, T] float32   1: counts in the loss
    sample   [n]    uint32    the global sample index (modulo 2**32)
    segment_ids [n, T] int32  packing="documents" only: which document of the window a token belongs to, from 0
    positions   [n, T] int32  packing="documents" only: from 0 at the window's start and at each document's start
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.shuffle import permute, random_bits

PHASE, ORDER = 2, 3  # streams of random bits


class Range(NamedTuple):
    """Token offsets start..stop-1 of a corpus."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def split(corpus: Corpus, validation_fraction: float, sequence_length: int) -> tuple[Range, Range]:
    """The first part of the tokens trains, the tail validates (empty if the fraction is 0)."""
    total = len(corpus.tokens)
    cut = int(total * (1 - validation_fraction))
    train, validation = Range(0, cut), Range(cut, total)
    for name, part in ("training", train), ("validation", validation):
        if part.size <= sequence_length and (name == "training" or validation_fraction):
            raise DataError(
                f"the {name} split is too short for a single sequence",
                asked=f"train.sequence_length={sequence_length} and the token after it",
                found=f"{part.size} of {total} tokens (data.validation_fraction={validation_fraction})",
                fix="a longer corpus or a smaller train.sequence_length",
            )
    return train, validation


def batch_ids(step: int, global_batch: int) -> np.ndarray:
    """Global sample indices of a step, int64 [global_batch]. A process that feeds some rows takes those."""
    return step * global_batch + np.arange(global_batch, dtype=np.int64)


class TrainStream:
    """Endless training samples; epochs follow one another without a seam.

    With `shuffle`, each epoch visits its windows in an order of its own, and its first window starts at a random
    phase in [0, sequence_length): otherwise the same tokens would stand at the start of a window in every epoch, and
    always be learned with little context. All epochs have equally many windows, so the epoch of a sample is a
    division; every token is predicted once per epoch, but for fewer than 2 * sequence_length at the two ends.
    """

    def __init__(
        self, corpus: Corpus, span: Range, sequence_length: int, *, seed: int, shuffle: bool, packing: str = "stream"
    ):
        assert span.size > sequence_length, "split() refuses this"
        self._corpus, self._span, self._length = corpus, span, sequence_length
        self._seed, self._shuffle, self._packing = seed, shuffle, packing
        # The last token is nobody's input. Shuffled, the largest phase must leave room for the same count.
        reserve = sequence_length if shuffle else 1
        self.windows = max(1, (span.size - reserve) // sequence_length)  # per epoch
        self._phases = min(sequence_length, span.size - self.windows * sequence_length) if shuffle else 1

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Token offset at which each sample's window starts, int64."""
        epoch, window = np.divmod(np.asarray(indices, np.int64), self.windows)
        if self._shuffle:
            window = permute(window, self.windows, random_bits(self._seed, ORDER, epoch))
        phase = random_bits(self._seed, PHASE, epoch) % np.uint64(self._phases)
        return self._span.start + phase.astype(np.int64) + window * self._length

    def samples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these global sample indices, whatever was asked before."""
        indices = np.asarray(indices, np.int64)
        assert len(indices) and indices.min() >= 0
        starts = self.starts(indices)
        rows = np.stack([self._corpus.read(start, start + self._length + 1) for start in starts.tolist()])
        mask = np.ones((len(rows), self._length), np.float32)
        return _batch(self._corpus, rows, starts, mask, indices, self._packing)


class EvalWindows:
    """A whole range once, in windows that do not overlap: every token but the first is a target exactly once.

    The last window is padded with id 0 and mask 0. Rows beyond `windows` are padding altogether.
    """

    def __init__(self, corpus: Corpus, span: Range, sequence_length: int, *, packing: str = "stream"):
        if span.size < 2:
            raise DataError("there are no validation tokens to evaluate on", fix="--set data.validation_fraction=0.1")
        self._corpus, self._span, self._length, self._packing = corpus, span, sequence_length, packing
        self.windows = -(-(span.size - 1) // sequence_length)

    def samples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of these windows; like TrainStream.samples, so a process can ask for its own rows only."""
        indices = np.asarray(indices, np.int64)
        starts = self._span.start + indices * self._length
        rows = np.zeros((len(indices), self._length + 1), np.int32)
        mask = np.zeros((len(indices), self._length), np.float32)
        for row, start in enumerate(starts.tolist()):
            stop = min(start + self._length + 1, self._span.stop)
            if stop - start >= 2:
                rows[row, : stop - start] = self._corpus.read(start, stop)
                mask[row, : stop - start - 1] = 1
        return _batch(self._corpus, rows, starts, mask, indices, self._packing)

    def num_batches(self, batch_size: int, limit: int | None = None) -> int:
        count = -(-self.windows // batch_size)
        return count if limit is None else min(limit, count)

    def batches(self, batch_size: int, limit: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """The windows in order, at most `limit` batches; the last one is padded to full size with mask 0."""
        for step in range(self.num_batches(batch_size, limit)):
            yield self.samples(batch_ids(step, batch_size))


def _batch(corpus: Corpus, rows, starts, mask, indices, packing: str) -> dict[str, np.ndarray]:
    """Rows [n, T + 1] of tokens that start at offsets `starts`, as the arrays that the module describes."""
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": mask, "sample": indices.astype(np.uint32)}
    if packing == "documents":
        offsets = starts[:, None] + np.arange(rows.shape[1])
        document = np.searchsorted(corpus.document_starts, offsets, side="right") - 1
        # A document that began before the window counts from the window: no position reaches sequence_length.
        origin = np.maximum(corpus.document_starts[document], starts[:, None])
        batch["mask"] = mask * (document[:, 1:] == document[:, :-1])
        batch["segment_ids"] = (document - document[:, :1])[:, :-1].astype(np.int32)
        batch["positions"] = (offsets - origin)[:, :-1].astype(np.int32)
    return {key: np.ascontiguousarray(value) for key, value in batch.items()}


class ReadAhead:
    """`make(step), make(step + 1), ...` by iteration, made up to `depth` ahead in a daemon thread.

    An error of `make` is raised where its step is asked for, with the traceback of the thread, and again at every
    later ask. Use it in a `with`, or call `close()`.
    """

    CLOSE_SECONDS = 5.0  # a `make` that hangs (a dead file system) must not hang the program's end as well

    def __init__(self, make: Callable[[int], object], step: int, depth: int = 2):
        self._make, self._depth = make, depth
        self._ready: deque = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._fill, args=(step,), name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self):
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            assert not self._closed, "asked for a batch after close()"
            if not self._ready:
                raise self._error
            self._changed.notify_all()
            return self._ready.popleft()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Stop the thread and wait for it (for `CLOSE_SECONDS` at most). May be called twice, and from anywhere."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(self.CLOSE_SECONDS)

    def _fill(self, step: int):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                if self._closed:
                    return
            try:
                value, error = self._make(step), None
            except BaseException as raised:  # handed over, not handled: the consumer raises it
                value, error = None, raised
            with self._changed:
                if error:
                    self._error = error
                elif not self._closed:
                    self._ready.append(value)
                self._changed.notify_all()
            if error:
                return
            step += 1
