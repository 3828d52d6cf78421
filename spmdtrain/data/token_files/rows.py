"""Reads rows of numbers in a file, and views several rows as one.

Files are read with pread, not mapped: truncating a mapped file kills the process with SIGBUS. The
price is a system call per window (benchmarks/reading.py).
"""

import contextlib
import os
import resource
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError

# The number of files kept open. Further rows open their file for every read.
MOST_OPEN = 128
# The share of the process's descriptors (often 1024) that may be in use when a file is kept open.
# The rest is left to everyone else in the process.
MOST_IN_USE = 0.75
MOST_AT_ONCE = 2**30  # bytes; Linux reads no more than 2 GiB in one call


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turns an OSError into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def require_file(path: str | Path) -> None:
    """Raises DataError if a path is not a regular file: opening a pipe would block forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path} is not a regular file")


class StoredRow:
    """A row of numbers in a file, opened on first read. Supports len() and slices of step 1.

    Raises DataError if the file has been truncated.
    """

    def __init__(self, path: str, dtype: np.dtype, size: int, skip: int = 0):
        """Describes a file that holds `size` numbers after `skip` bytes."""
        self.path = path
        self.dtype = dtype
        self.size = size
        self.skip = skip
        self._open: int | None = None  # its descriptor, if kept open

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(self.size)
        assert step == 1
        wanted = max(stop - start, 0) * self.dtype.itemsize
        begin = self.skip + start * self.dtype.itemsize
        with reading(self.path):
            descriptor = self._descriptor()
            file = os.open(self.path, os.O_RDONLY) if descriptor is None else descriptor
            try:
                content = _pread(file, wanted, begin)
            finally:
                if descriptor is None:
                    os.close(file)
        if len(content) < wanted:
            raise DataError(
                f"{self.path} was cut short while it was in use", asked=f"{self.size} tokens"
            )
        return np.frombuffer(content, self.dtype)

    def part(self, start: int, stop: int) -> "StoredRow":
        """Returns the numbers start to stop - 1 as a separate row."""
        assert 0 <= start <= stop <= self.size
        skip = self.skip + start * self.dtype.itemsize
        return StoredRow(self.path, self.dtype, stop - start, skip)

    def will_need(self, start: int, stop: int) -> None:
        """Asks the kernel to read the numbers start to stop - 1, without waiting.

        Does nothing for a row that is not kept open.
        """
        start = max(start, 0)
        stop = min(stop, self.size)
        if start >= stop or not hasattr(os, "posix_fadvise"):  # macOS lacks it
            return
        size = (stop - start) * self.dtype.itemsize
        begin = self.skip + start * self.dtype.itemsize
        with reading(self.path):
            file = self._descriptor()
            if file is not None:
                os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)

    def _descriptor(self) -> int | None:
        """Returns the file descriptor, kept open; None if no more are to be kept."""
        if self._open is None and _opened.take():
            try:
                file = os.open(self.path, os.O_RDONLY)
            except OSError:
                _opened.give()
                raise
            if not _can_stay_open(file):
                _close(file)
                return None
            weakref.finalize(self, _close, file)
            self._open = file
        return self._open


class _Opened:
    """The number of files kept open."""

    def __init__(self):
        self._count = 0
        self._lock = threading.RLock()  # a row may be garbage-collected while its thread counts

    def take(self) -> bool:
        """Counts one more file unless the limit is reached; returns whether it did."""
        with self._lock:
            if self._count >= MOST_OPEN:
                return False
            self._count += 1
            return True

    def give(self) -> None:
        """Counts one file less."""
        with self._lock:
            self._count -= 1


_opened = _Opened()


def _can_stay_open(file: int) -> bool:
    """Returns True if the process can spare this descriptor.

    A descriptor is the lowest number that was free: all below it are in use, whoever opened them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or file < MOST_IN_USE * limit


def _close(file: int) -> None:
    os.close(file)
    _opened.give()


def _pread(file: int, wanted: int, begin: int) -> bytes:
    """Returns the bytes from `begin` on: fewer than `wanted` only at the end of the file."""
    content = os.pread(file, min(wanted, MOST_AT_ONCE), begin)
    if len(content) == wanted or not content:
        return content
    parts = [content]
    read = len(content)
    while read < wanted:
        content = os.pread(file, min(wanted - read, MOST_AT_ONCE), begin + read)
        if not content:
            break
        parts.append(content)
        read += len(content)
    return b"".join(parts)


class Concatenated:
    """A view of several rows of tokens as one. Supports len() and slices of step 1.

    A slice reads only the parts it touches.
    """

    def __init__(self, parts: "Sequence[np.ndarray | StoredRow]"):
        self.parts = parts  # none is empty
        self.bounds = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1
        index = min(bisect_right(self.bounds, start), len(self.parts)) - 1
        pieces = []
        while not pieces or start < stop:  # an empty slice needs an empty piece for its dtype
            first = self.bounds[index]
            end = self.bounds[index + 1]
            piece_stop = max(start, min(stop, end))
            pieces.append(self.parts[index][start - first : piece_stop - first])
            start = end
            index += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
