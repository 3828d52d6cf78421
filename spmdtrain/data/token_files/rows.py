"""Rows of numbers: in a file, and several rows seen as one.

A file is read with pread and not mapped: one that is cut short while it is mapped kills the process
with SIGBUS. A window costs a system call for that (benchmarks/reading.py).
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

# Files of rows that stay open, or a quarter of those that the process may have open, often 1024, if
# that is less. Rows beyond these open their file whenever they read it.
MOST_OPEN = 128
MOST_AT_ONCE = 2**30  # bytes; Linux reads no more than 2 GiB in one call


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names what could not be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def require_file(path: str | Path) -> None:
    """Raise DataError where a path names no regular file: to open a pipe would wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path} is no regular file")


class StoredRow:
    """Numbers in a file, which is opened when it is first read. It supports len(), and step 1.

    Raises DataError where the file has become shorter than it was.
    """

    def __init__(self, path: str, dtype: np.dtype, size: int, skip: int = 0):
        """`size` numbers stand in the file after `skip` bytes."""
        self.path = path
        self.dtype = dtype
        self.size = size
        self.skip = skip
        self._open: int | None = None  # its descriptor, where it stays open

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(self.size)
        assert step == 1
        wanted = max(stop - start, 0) * self.dtype.itemsize
        begin = self.skip + start * self.dtype.itemsize
        with reading(self.path):
            kept = self._descriptor()
            file = os.open(self.path, os.O_RDONLY) if kept is None else kept
            try:
                content = _pread(file, wanted, begin)
            finally:
                if kept is None:
                    os.close(file)
        if len(content) < wanted:
            raise DataError(
                f"{self.path} was cut short while it was in use", asked=f"{self.size} tokens"
            )
        return np.frombuffer(content, self.dtype)

    def part(self, start: int, stop: int) -> "StoredRow":
        """Return the numbers start to stop - 1 as a row of their own."""
        assert 0 <= start <= stop <= self.size
        skip = self.skip + start * self.dtype.itemsize
        return StoredRow(self.path, self.dtype, stop - start, skip)

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read the numbers start to stop - 1, and do not wait.

        A row that does not stay open leaves it.
        """
        start = max(start, 0)
        stop = min(stop, self.size)
        if start >= stop or not hasattr(os, "posix_fadvise"):  # macOS has none
            return
        size = (stop - start) * self.dtype.itemsize
        begin = self.skip + start * self.dtype.itemsize
        with reading(self.path):
            file = self._descriptor()
            if file is not None:
                os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)

    def _descriptor(self) -> int | None:
        """Return the file, opened for good; None where as many stay open as may."""
        if self._open is None and _opened.take():
            try:
                self._open = os.open(self.path, os.O_RDONLY)
            except OSError:
                _opened.give()
                raise
            weakref.finalize(self, _close, self._open)
        return self._open


class _Opened:
    """Counts the files that stay open."""

    def __init__(self):
        self._count = 0
        self._lock = threading.RLock()  # a row may be collected while its own thread counts

    def take(self) -> bool:
        """Count one more, if there may be; return whether there may."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            if self._count >= min(MOST_OPEN, soft // 4 if soft > 0 else MOST_OPEN):
                return False
            self._count += 1
            return True

    def give(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1


_opened = _Opened()


def _close(file: int) -> None:
    os.close(file)
    _opened.give()


def _pread(file: int, wanted: int, begin: int) -> bytes:
    """Return the bytes from `begin` on: fewer than `wanted` only where the file ends."""
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
    """Several rows of tokens seen as one. It supports len(), and slices of step 1.

    A slice reads only the parts that it touches.
    """

    def __init__(self, parts: "Sequence[np.ndarray | StoredRow]"):
        self.parts = parts  # none of them empty
        self.bounds = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1
        index = min(bisect_right(self.bounds, start), len(self.parts)) - 1
        pieces = []
        while not pieces or start < stop:  # an empty slice takes an empty piece, for its dtype
            first = self.bounds[index]
            end = self.bounds[index + 1]
            piece_stop = max(start, min(stop, end))
            pieces.append(self.parts[index][start - first : piece_stop - first])
            start = end
            index += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
