"""Batches as pure functions of the sample index, and a thread that makes them ahead of time.

A *window* is `sequence_length + 1` consecutive tokens: the first `sequence_length` are the inputs,
the last `sequence_length` the targets. A *sample* is one window. The global sample index counts the
samples of a whole run. So a position in the data is the pair (seed, index), no matter how many
processes share a batch.

A batch of n samples is a dict of arrays with n rows, where T is `sequence_length`:

    tokens      [n, T] int32    inputs
    targets     [n, T] int32    the token after each input
    mask        [n, T] float32  1: counts in the loss; 0: does not
    sample      [n]    uint32   the global sample index (modulo 2**32)

for a mixture, also

    source      [n]    int32    the source of the sample, from 0

and with packing="documents" or "best_fit" (packing.py), also:

    segment_ids [n, T] int32    the document of each token within the window, from 0
    positions   [n, T] int32    from 0 at the start of the window and of each document

Arrays beside the tokens of a corpus (token_arrays.py) have names of their own.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.indices import check_range, sample_indices
from spmdtrain.data.shuffle import permute, random_bits
from spmdtrain.data.token_arrays import TokenArrays

Batch = dict[str, np.ndarray]

# Streams of random bits; corpus.py uses 0 and 1.
PHASE = 2
ORDER = 3


class Range(NamedTuple):
    """The tokens of a corpus at the offsets start to stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Windows(Protocol):
    """The samples of an evaluation, by index. From `windows` on they are all padding."""

    @property
    def windows(self) -> int: ...

    def samples(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


class EvalSet(NamedTuple):
    """A set of windows that is evaluated separately; the overall loss is the mean by `weight`."""

    name: str  # the source in a mixture, else ""
    weight: float  # all weights add up to 1
    windows: Windows
    tokens: int  # tokens of the split that follow another, masked or not; or its pairs of answers


def split(
    corpus: Corpus, validation_fraction: float, sequence_length: int, source: str = ""
) -> tuple[Range, Range]:
    """Returns the ranges (training, validation): the first tokens train, the tail validates.

    If the corpus has separate validation files, those are the tail. The tail is empty if the
    fraction is 0. `source` is the name of the corpus in a mixture. Raises DataError if either part
    is shorter than one sequence.
    """
    total = len(corpus.tokens)
    fraction = f"data.validation_fraction={validation_fraction}"
    cut = corpus.validation_start
    if cut is None:
        cut = int(total * (1 - validation_fraction))
    elif not corpus.file_offsets:
        fraction = "data.validation_path"
    train = Range(0, cut)
    validation = Range(cut, total)
    parts = {"training": train}
    if validation.size or validation_fraction:
        parts["validation"] = validation
    fixes = {
        "training": "a longer corpus or a smaller train.sequence_length",
        "validation": "a larger data.validation_fraction or a smaller train.sequence_length",
    }
    of_source = f" of {source}" if source else ""
    for name, part in parts.items():
        if part.size <= sequence_length:
            raise DataError(
                f"the {name} split{of_source} is too short for a single sequence",
                asked=f"train.sequence_length={sequence_length} and the token after it",
                found=f"{part.size} of {total} tokens ({fraction})",
                fix=fixes[name],
            )
    return train, validation


def batch_ids(step: int, global_batch: int) -> np.ndarray:
    """Returns the global sample indices of a step, int64 [global_batch].

    A process that feeds only some rows selects those.
    """
    return step * global_batch + np.arange(global_batch, dtype=np.int64)


class TrainStream:
    """An endless stream of training samples: one epoch after another, seamlessly.

    With `shuffle`, each epoch visits its windows in its own order, and its first window starts at a
    random phase in [0, sequence_length). With a fixed phase, the same tokens would always be at the
    start of a window and always be learned with little context.

    All epochs have the same number of windows, so a division gives the epoch of a sample. Every
    token is predicted once per epoch, except for fewer than 2 * sequence_length at the two ends.
    """

    def __init__(
        self,
        corpus: Corpus,
        span: Range,
        sequence_length: int,
        *,
        seed: int,
        shuffle: bool,
        packing: str = "stream",
        beside: TokenArrays | None = None,
    ):
        check_range(*span, len(corpus.tokens), sequence_length)
        if span.size <= sequence_length:  # split() reports this, with a fix to type
            raise DataError(
                "the range is too short for a single sequence",
                asked=f"{sequence_length} tokens and the one after them",
                found=f"{span.size} tokens",
            )
        self._corpus = corpus
        self._span = span
        self._length = sequence_length
        self._seed = seed
        self._shuffle = shuffle
        self._packing = packing
        self._beside = beside
        # The last token is never an input. With a phase, the largest one must leave room for as
        # many windows as the others.
        reserve = sequence_length if shuffle else 1
        self.windows = max(1, (span.size - reserve) // sequence_length)  # per epoch
        self._phases = 1
        if shuffle:
            self._phases = min(sequence_length, span.size - self.windows * sequence_length)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Returns the token offset at which each sample's window starts, int64 [n]."""
        epoch, window = np.divmod(sample_indices(indices), self.windows)
        if self._shuffle:
            window = permute(window, self.windows, random_bits(self._seed, ORDER, epoch))
        phase = random_bits(self._seed, PHASE, epoch) % np.uint64(self._phases)
        return self._span.start + phase.astype(np.int64) + window * self._length

    def samples(self, indices: np.ndarray) -> Batch:
        """Returns the batch of these global sample indices; earlier calls do not matter."""
        indices = sample_indices(indices)
        if not len(indices):
            raise DataError("a batch has at least one sample", found="no sample index")
        starts = self.starts(indices)
        for start in starts.tolist():
            self._corpus.will_need(start, start + self._length + 1)
        windows = [self._corpus.read(start, start + self._length + 1) for start in starts.tolist()]
        rows = np.stack(windows)
        counts = [self._corpus.counts(at + 1, at + self._length + 1) for at in starts.tolist()]
        mask = np.stack(counts)
        batch = make_batch(self._corpus, rows, starts, mask, indices, self._packing)
        if self._beside is None:
            return batch
        return batch | self._beside.of_windows(starts, self._length)


class EvalWindows:
    """One pass over a range of tokens, in windows that do not overlap.

    Every token but the first is a target exactly once. The last window is padded with id 0 and mask
    0; later windows are all padding. Raises DataError if there are no tokens.
    """

    def __init__(
        self, corpus: Corpus, span: Range, sequence_length: int, *, packing: str = "stream"
    ):
        check_range(*span, len(corpus.tokens), sequence_length)
        if span.size < 2:
            raise DataError(
                "there are no validation tokens to evaluate on",
                fix="--set data.validation_fraction=0.1",
            )
        self._corpus = corpus
        self._span = span
        self._length = sequence_length
        self._packing = packing
        self.windows = -(-(span.size - 1) // sequence_length)

    def samples(self, indices: np.ndarray) -> Batch:
        """Returns the batch of these windows; a process can ask for its own rows only."""
        indices = sample_indices(indices)
        # Clipped so that the start of a far later window still fits in 64 bits.
        starts = self._span.start + np.minimum(indices, 2**62 // self._length) * self._length
        rows = np.zeros((len(indices), self._length + 1), np.int32)
        mask = np.zeros((len(indices), self._length), np.float32)
        stops = np.minimum(starts + self._length + 1, self._span.stop)
        inside = np.flatnonzero(stops - starts >= 2)  # at least one input and its target
        parts = list(
            zip(inside.tolist(), starts[inside].tolist(), stops[inside].tolist(), strict=True)
        )
        for _, start, stop in parts:
            self._corpus.will_need(start, stop)
        for row, start, stop in parts:
            rows[row, : stop - start] = self._corpus.read(start, stop)
            mask[row, : stop - start - 1] = self._corpus.counts(start + 1, stop)
        return make_batch(self._corpus, rows, starts, mask, indices, self._packing)


def make_batch(
    corpus: Corpus,
    rows: np.ndarray,
    starts: np.ndarray,
    mask: np.ndarray,
    indices: np.ndarray,
    packing: str,
) -> Batch:
    """Returns the arrays that the module's docstring describes.

    `rows` [n, T + 1] are windows of tokens that start at the offsets `starts` [n].
    """
    batch = {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "mask": mask,
        "sample": indices.astype(np.uint32),
    }
    if packing == "documents":
        offsets = starts[:, None] + np.arange(rows.shape[1])
        document = np.searchsorted(corpus.document_starts, offsets, side="right") - 1
        # A document that began before the window counts from the window's start, so positions stay
        # below sequence_length.
        origin = np.maximum(corpus.document_starts[document], starts[:, None])
        batch["mask"] = mask * (document[:, 1:] == document[:, :-1])
        batch["segment_ids"] = (document - document[:, :1])[:, :-1].astype(np.int32)
        batch["positions"] = (offsets - origin)[:, :-1].astype(np.int32)
    return {key: np.ascontiguousarray(value) for key, value in batch.items()}


class ReadAhead:
    """An iterator over `make(step), make(step + 1), ...` that works ahead in a daemon thread.

    At most `depth` values wait. An error of `make` is raised when its step is requested, with the
    thread's traceback, and again on every later request. Use it in a `with`, or call `close()`.
    """

    # A `make` that hangs (e.g. on a dead file system) must not keep the program from exiting.
    CLOSE_SECONDS = 5.0

    def __init__(self, make: Callable[[int], object], step: int, depth: int = 2):
        self._make = make
        self._depth = depth
        self._ready: deque = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(
            target=self._fill, args=(step,), name="read-ahead", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self):
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            assert not self._closed, "asked for a batch after close()"
            if not self._ready and self._error is not None:
                raise self._error
            self._changed.notify_all()
            return self._ready.popleft()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Stops the thread and waits for it, at most `CLOSE_SECONDS`.

        It may be called twice, and from any thread.
        """
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
                value = self._make(step)
            except BaseException as error:  # passed on: the consumer raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._closed:
                    self._ready.append(value)
                self._changed.notify_all()
            step += 1
