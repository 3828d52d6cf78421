"""Exchanges documents and rows between islands, in a folder that all their processes can reach.

Each entry is a folder that is written under another name and then renamed. Only one rename
succeeds; an island that comes second keeps the entry of the first. The file system needs nothing
but an atomic rename of folders, so it may be mounted.

The processes of an island leave a folder together. Process 0 makes it; each writes the ranges that
it has of the rows; process 0 adds about.json, which lists the ranges in each file, and renames it.
Process 0 alone looks into the folder, and broadcasts what it sees, because hosts may see a change
of a mounted folder at different times.
"""

import contextlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmdtrain.config.errors import StorageError
from spmdtrain.processes.processes import (
    by_process_0,
    gather_texts,
    this_process,
    together,
)
from spmdtrain.train.islands.fragment_rows import BLOCK, Held, Range, Row, joined

ABOUT, RANGES = "about.json", "ranges"
NUMBERS, SCALES = "numbers", "scales"
_NOTHING = np.zeros(0, np.float32)


class Folder:
    """The folder, as island `index` sees it.

    `sent` and `received` count the bytes of rows that this process has written, and read of others.
    """

    def __init__(self, root: Path, index: int):
        self.root = root
        self._index = index
        self.sent = 0
        self.received = 0

    def has(self, where: Path) -> bool:
        """Returns True if something has been left there; only process 0 asks."""
        return (self.root / where).exists()

    def document(self, where: Path) -> Any:
        """Returns the document that was left there; only process 0 asks."""
        return json.loads((self.root / where / ABOUT).read_text(encoding="utf-8"))

    def leave(self, where: Path, document: Any, rows: Mapping[str, Held] | None = None) -> bool:
        """Leaves a document, with rows if there are any. Returns False if it was there already.

        A collective: every process must call it, with its own ranges of the rows.
        """
        target = self.root / where
        aside = target.with_name(f".{target.name}.{self._index}")
        if not by_process_0(lambda: _begun(target, aside)):
            return False
        if rows:
            self._write_rows(target, aside, rows)
            document = document | {RANGES: _ranges_of_all(rows)}
        return by_process_0(lambda: _ended(target, aside, document))

    def read(
        self, parts: Sequence[Path], name: str, ranges: Sequence[Range], own: Collection[Path] = ()
    ) -> Held:
        """Reads ranges of a row, which all `parts` together have.

        Counts the bytes of those parts that this island has not left itself: they are not `own`.
        """
        abouts = by_process_0(lambda: [self.document(part) for part in parts])
        pieces = left_in(parts, [about[RANGES][name] for about in abouts])
        rows = []
        for first, end in ranges:
            for piece in overlapping(pieces, first, end):
                row = self._read(piece, name)
                self.received += 0 if piece.part in own else row.nbytes
                rows.append(row)
        return Held(ranges, joined(rows) if rows else Row(_NOTHING, _NOTHING))

    def _write_rows(self, target: Path, aside: Path, rows: Mapping[str, Held]) -> None:
        process, _ = this_process()
        with together(), _writing(target):
            for name, held in rows.items():
                for file, content in zip(_files(name, process), held.row, strict=True):
                    _write(aside / file, content)
                self.sent += held.row.nbytes

    def _read(self, piece: "LeftRange", name: str) -> Row:
        folder = self.root / piece.part
        start, stop = piece.offset, piece.offset + piece.size
        numbers, scales = (folder / file for file in _files(name, piece.process))
        if not scales.stat().st_size:
            return Row(_some(numbers, np.dtype(np.float32), start, stop), _NOTHING)
        return Row(
            _some(numbers, np.dtype(np.uint8), start, stop),
            _some(scales, np.dtype(np.float32), start // BLOCK, stop // BLOCK),
        )


class LeftRange(NamedTuple):
    """A range of a row, from `first` to `end`, that a process has left: in its file from `offset`
    on.
    """

    first: int
    end: int
    part: Path
    process: int
    offset: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def cut(self, first: int, end: int) -> "LeftRange":
        """Returns the numbers that are between `first` and `end`."""
        first = max(first, self.first)
        offset = self.offset + first - self.first
        return self._replace(first=first, end=min(end, self.end), offset=offset)


def _files(name: str, process: int) -> tuple[str, str]:
    """Returns the files of the numbers and of the scales that a process has of a row."""
    return f"{name}.{process}.{NUMBERS}", f"{name}.{process}.{SCALES}"


def left_in(parts: Sequence[Path], written: Sequence[Sequence[Sequence[Range]]]) -> list[LeftRange]:
    """Returns what each process has written of each part, in the order of the row."""
    pieces = []
    for part, of_part in zip(parts, written, strict=True):
        for process, ranges in enumerate(of_part):
            offset = 0
            for first, end in ranges:
                pieces.append(LeftRange(first, end, part, process, offset))
                offset += end - first
    return sorted(pieces)


def overlapping(pieces: Sequence[LeftRange], first: int, end: int) -> Iterator[LeftRange]:
    """Yields, in order, what ranges that touch have between two numbers."""
    at = bisect_right(pieces, first, key=lambda piece: piece.first) - 1
    while first < end:
        part = pieces[at].cut(first, end)
        assert part.first == first < part.end, f"nothing has number {first} of the row"
        yield part
        first, at = part.end, at + 1


def _ranges_of_all(rows: Mapping[str, Held]) -> dict[str, list[Sequence[Range]]]:
    """Returns the ranges of each row that each process has."""
    own = {name: list(held.ranges) for name, held in rows.items()}
    of_all = [json.loads(text) for text in gather_texts(json.dumps(own))]
    return {name: [of_one[name] for of_one in of_all] for name in rows}


def _begun(target: Path, aside: Path) -> bool:
    """Makes the folder aside; returns False if the target is there."""
    with _writing(target):
        if target.exists():
            return False
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    return True


def _ended(target: Path, aside: Path, document: Any) -> bool:
    """Renames the folder, with its document; returns False if another island was first."""
    with _writing(target):
        _write(aside / ABOUT, json.dumps(document).encode())
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():
                raise
            shutil.rmtree(aside, ignore_errors=True)
            return False
    return True


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the meeting of islands cannot be written: {error.strerror}",
            found=str(target),
            fix="room and permission in islands.directory, which all processes of an island reach",
        ) from None


def _write(file: Path, content: bytes | np.ndarray) -> None:
    with file.open("wb") as stream:
        if isinstance(content, bytes):
            stream.write(content)
        else:
            content.tofile(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _some(file: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(file, dtype, stop - start, offset=start * dtype.itemsize)
