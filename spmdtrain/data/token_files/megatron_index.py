"""Reads the .idx of a Megatron token file (megatron/core/datasets/indexed_dataset.py).

Little endian: the 9 bytes MMIDIDX 0 0, version uint64 1, code of the id type uint8, number of
sequences uint64, number of document bounds uint64; then the length of each sequence int32, the
start of each in bytes int64, and the document bounds int64: the index of each document's first
sequence, and finally the number of sequences.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.token_files.rows import reading

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Signed types are read as unsigned: a negative id is then beyond any vocabulary and is refused.
DTYPES = {1: "<u1", 2: "<u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}


class Index(NamedTuple):
    """The content of an .idx."""

    dtype: np.dtype
    size: int  # tokens
    starts: np.ndarray  # offsets of documents, int64, strictly increasing, the first is 0


def read_index(path: Path) -> Index:
    """Reads an .idx. Raises DataError if it is inconsistent."""
    with reading(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{path} is truncated", found=f"{size} bytes")
    _, version, code, sequences, bounds = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise DataError(
            f"{path} has a Megatron version or type that this program cannot read",
            asked=f"version 1 and one of the types {known}",
            found=f"version {version} and type {code}",
        )
    expected = HEADER.size + sequences * 12 + bounds * 8
    if sequences and size == expected + sequences:
        raise DataError(
            f"{path} is of a multimodal data set: not all of its tokens are text",
            found=f"a mode of each of its {sequences} sequences",
            fix="an index that preprocess_data.py wrote for text alone",
        )
    if size != expected:
        wrong = "truncated" if size < expected else "too long"
        raise DataError(f"{path} is {wrong}", asked=f"{expected} bytes", found=f"{size} bytes")
    lengths, pointers, documents = _read_parts(path, sequences, bounds)
    dtype = np.dtype(DTYPES[code])
    if lengths.min(initial=0) < 0:
        raise DataError(f"{path} is damaged: a sequence has {lengths.min()} tokens")
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if sequences else 0
    if not total or not np.array_equal(pointers, starts * dtype.itemsize):
        raise DataError(f"{path} is empty, or its sequences are not consecutive")
    in_range = documents.min(initial=0) >= 0 and documents.max(initial=0) <= sequences
    if not in_range:
        raise DataError(f"{path} is damaged: a document is beyond its {sequences} sequences")
    if (np.diff(documents) < 0).any():
        raise DataError(f"{path} is damaged: its documents do not rise")
    first, last = (int(documents[0]), int(documents[-1])) if bounds else (0, 0)
    if (first, last) != (0, sequences):
        raise DataError(
            f"{path} is damaged: its documents leave out sequences, as of an index that was merged "
            "without its document bounds",
            asked=f"bounds from 0 to {sequences}",
            found=f"{bounds} bounds from {first} to {last}",
            fix="merging again with tools/merge_datasets.py",
        )
    offsets = np.append(starts, total)[documents]
    # Empty documents have no start; the first start is always 0.
    rising = np.unique(np.append(offsets[offsets < total], 0))
    return Index(dtype, total, rising)


def _read_parts(path: Path, sequences: int, bounds: int) -> tuple[np.ndarray, ...]:
    """Returns the lengths of sequences, their starts in bytes, and document bounds, int64."""
    with reading(path), path.open("rb") as file:
        file.seek(HEADER.size)
        kinds = (("<i4", sequences), ("<i8", sequences), ("<i8", bounds))
        parts = [
            np.fromfile(file, dtype, count).astype(np.int64, copy=False) for dtype, count in kinds
        ]
    if [len(part) for part in parts] != [sequences, sequences, bounds]:
        raise DataError(f"{path} was cut short while it was read")
    return tuple(parts)
