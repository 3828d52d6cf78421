"""Writes safetensors files whose tensors come one by one, in any order.

Shapes determine sizes, so the header of every file is written first, and then each tensor at its
place, with one tensor in memory. A directory is written under another name and then renamed: if it
exists, it is complete.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spmdtrain.config.errors import StorageError
from spmdtrain.config.writing import writing
from spmdtrain.interop.pieces import Rows, Shape, Written
from spmdtrain.interop.safetensors_files import INDEX, SINGLE
from spmdtrain.processes.processes import of_process_0, together

NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
PART = 5 * 10**9  # bytes of a file, as in transformers 4
UNFLUSHED = 2**26  # bytes that are written before the disk is waited for


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype of float32, bfloat16 or float16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class InFile:
    """The place of a tensor: `offset` bytes from the start of a file."""

    file: str
    offset: int
    shape: Shape


class TensorWriter:
    """A writer of files for tensors of these shapes and dtypes: those of `files`, or else parts of
    at most `part` bytes.

    Of several processes, one creates all files, and then each writes the tensors of its share of
    them.
    """

    def __init__(  # noqa: PLR0913 - what the files hold, and who writes them
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, str],
        *,
        files: Sequence[Sequence[str]] | None = None,
        part: int = PART,
        process: int = 0,
        processes: int = 1,
    ):
        self._folder = folder
        self._shapes = shapes
        self._dtypes = dtypes
        self._sizes = {
            name: math.prod(shape) * numpy_dtype(dtypes[name]).itemsize
            for name, shape in shapes.items()
        }
        groups = files or _groups(self._sizes, part)
        self.files = _file_names(len(groups))
        self.bytes = sum(self._sizes.values())
        self._headers: dict[str, bytes] = {}
        self._places: dict[str, InFile] = {}
        for file, names in zip(self.files, groups, strict=True):
            self._plan(file, {name: shapes[name] for name in names})
        self._rows_left = {name: _rows(shapes[name]) for name in self.names_of(process, processes)}
        self._mine = self.files[process::processes]
        self._unflushed = 0

    def names_of(self, process: int, processes: int) -> set[str]:
        """Returns the tensors that a process writes: those of every `processes`-th file."""
        mine = self.files[process::processes]
        return {name for name, place in self._places.items() if place.file in mine}

    def begin(self) -> None:
        """Creates the files at their final size, and their index. One process calls it."""
        sizes = dict.fromkeys(self.files, 0)
        for name, place in self._places.items():
            sizes[place.file] = max(sizes[place.file], place.offset + self._sizes[name])
        with writing(self._folder):
            for file, header in self._headers.items():
                with (self._folder / file).open("wb") as opened:
                    opened.write(header)
                    opened.truncate(sizes[file])
            if len(self.files) > 1:
                self._write_index(sum(map(math.prod, self._shapes.values())))

    def _plan(self, file: str, shapes: Mapping[str, Shape]) -> None:
        """Decides where each tensor of a file goes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + self._sizes[name]
            dtype = NAMES[self._dtypes[name]]
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._headers[file] = len(header).to_bytes(8, "little") + header
        for name, shape in shapes.items():
            first = 8 + len(header) + entries[name]["data_offsets"][0]
            self._places[name] = InFile(file, first, shape)

    def _write_index(self, parameters: int) -> None:
        metadata = {"total_size": self.bytes, "total_parameters": parameters}
        file_of = {name: place.file for name, place in sorted(self._places.items())}
        text = json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2)
        (self._folder / INDEX).write_text(text + "\n", encoding="utf-8")

    def write(self, name: str, written: Written) -> None:
        """Writes one tensor at its place, or some of its rows, rounded to its dtype."""
        place = self._places[name]
        tensor, rows = written if isinstance(written, Rows) else (written, (slice(None),))
        assert tensor.shape == place.shape, (name, tensor.shape, place.shape)
        with writing(self._folder), (self._folder / place.file).open("r+b") as file:
            for cut in rows:
                part = tensor[cut] if tensor.ndim else tensor
                content = np.ascontiguousarray(part, numpy_dtype(self._dtypes[name]))
                before = content.nbytes // max(len(content), 1) * (cut.start or 0)
                file.seek(place.offset + before)
                file.write(content.view(np.uint8).data)
                self._unflushed += content.nbytes
                self._rows_left[name] -= _rows(part.shape)
            if self._unflushed > UNFLUSHED:  # so that the disk works from the beginning
                file.flush()
                os.fdatasync(file.fileno())
                self._unflushed = 0

    def finish(self) -> None:
        """Flushes this process's files to disk.

        It is a bug if not all of their tensors have been written.
        """
        unwritten = [name for name, rows in self._rows_left.items() if rows]
        assert not unwritten, sorted(unwritten)[:5]
        with writing(self._folder):
            for file in self._mine:
                with (self._folder / file).open("rb") as opened:
                    os.fsync(opened.fileno())


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def _groups(sizes: Mapping[str, int], part: int) -> list[list[str]]:
    """Returns the names of each file's tensors, which are never split."""
    groups: list[list[str]] = [[]]
    full = 0
    for name, size in sizes.items():
        if groups[-1] and full + size > part:
            groups.append([])
            full = 0
        groups[-1].append(name)
        full += size
    return groups


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


def refuse_full(folder: Path) -> None:
    """Raises StorageError if an export would overwrite something."""
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        if names:
            raise StorageError(f"{folder} is not empty", found=names[0], fix="another folder")
    elif folder.exists() or folder.is_symlink():
        raise StorageError(f"{folder} exists and is not a folder", fix="another folder")


@contextlib.contextmanager
def new_folder(folder: Path, *, process: int = 0) -> Iterator[Path]:
    """Yields a folder to write into; it gets its name once complete, and is removed on an error.

    All processes enter it, and write into the folder that process 0 creates.
    """
    with together():
        refuse_full(folder)
    spare = folder.with_name(f"{folder.name}.tmp-{of_process_0(os.getpid())}")
    try:
        with together(), writing(folder):
            if process == 0:
                spare.mkdir(parents=True)
        with together():
            yield spare
        with together(), writing(folder):
            if process == 0:
                spare.replace(folder)  # an empty folder of that name is replaced
    finally:
        if process == 0:
            shutil.rmtree(spare, ignore_errors=True)
