"""Read the token files of other programs as they are: nanoGPT's .bin, Megatron's .bin and .idx.

Neither says how many ids there are, nor what they mean, so a run has to: by `model.vocab`, or by
`data.tokenizer`. They are mapped, not copied.

    nanoGPT    NAME.bin alone: ids as uint16, little endian
    Megatron   NAME.bin: ids; NAME.idx, little endian: the 9 bytes MMIDIDX 0 0, version uint64 1,
               code of the ids' type uint8, number of sequences uint64, number of document bounds
               uint64, then of each sequence its length int32, of each its start in bytes int64,
               and the bounds of documents int64: the number of each one's first sequence, and at
               last the number of sequences (megatron/core/datasets/indexed_dataset.py)
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.tokens import MappedTokens, Unmapped

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# The signed types are read as unsigned: a negative id is then beyond any vocabulary, and refused.
MEGATRON_DTYPES = {1: "<u1", 4: "<u4", 5: "<u8", 8: "<u2"}
BARE_DTYPE = np.dtype("<u2")
# A fingerprint reads so much of a file, spread over it: these files may hold terabytes.
FINGERPRINT_BLOCKS = 64
FINGERPRINT_BYTES = 2**16


@dataclass(frozen=True)
class ForeignTokens(MappedTokens):
    """A token file that another program has written. It has the properties of a TokenSource."""

    path: str  # of the .bin
    dtype: np.dtype
    size: int  # tokens
    starts: np.ndarray | None  # offsets of documents, int64; None: it does not say

    vocab = None
    tokenizer_spec = None
    end_of_text = None
    has_loss = False

    @property
    def has_documents(self) -> bool:
        return self.starts is not None

    @property
    def document_starts(self) -> np.ndarray:
        return np.zeros(1, np.int64) if self.starts is None else self.starts

    @property
    def unmapped(self) -> Unmapped:
        return Unmapped(self.path, self.dtype, self.size)

    @property
    def loss(self) -> np.ndarray:
        return np.broadcast_to(np.uint8(1), self.size)

    unmapped_loss = loss

    @cached_property
    def fingerprint(self) -> str:
        """A hex hash of sizes, documents and some of the content: see FINGERPRINT_BLOCKS."""
        digest = hashlib.sha256(f"{self.dtype.str} {self.size}".encode())
        digest.update(self.document_starts.data)
        total = self.size * self.dtype.itemsize
        last = max(total - FINGERPRINT_BYTES, 0)
        with open(self.path, "rb") as file:
            for at in np.linspace(0, last, FINGERPRINT_BLOCKS, dtype=np.int64).tolist():
                file.seek(at)
                digest.update(file.read(FINGERPRINT_BYTES))
        return digest.hexdigest()


def is_foreign(bin_path: Path, idx_path: Path, json_path: Path) -> bool:
    """Return whether a token file is another program's: it has no sidecar of ours."""
    if json_path.is_file():
        return False
    if not idx_path.is_file():
        return bin_path.is_file()
    with idx_path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_foreign(bin_path: Path, idx_path: Path) -> ForeignTokens:
    """Open it. Raises DataError where its sizes do not fit."""
    if idx_path.is_file():
        return _open_megatron(bin_path, idx_path)
    size = bin_path.stat().st_size
    if size == 0 or size % BARE_DTYPE.itemsize:
        raise DataError(
            f"{bin_path} has neither sidecar nor .idx, and is no row of uint16",
            found=f"{size} bytes",
            fix="spmdtrain data prepare",
        )
    return ForeignTokens(str(bin_path), BARE_DTYPE, size // BARE_DTYPE.itemsize, None)


def _open_megatron(bin_path: Path, idx_path: Path) -> ForeignTokens:
    size = idx_path.stat().st_size
    with idx_path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{idx_path} is truncated", found=f"{size} bytes")
    _, version, code, sequences, bounds = HEADER.unpack(header)
    if version != 1 or code not in MEGATRON_DTYPES:
        known = ", ".join(map(str, MEGATRON_DTYPES))
        raise DataError(
            f"{idx_path} is of a Megatron version or type that this program does not read",
            asked=f"version 1 and one of the types {known}",
            found=f"version {version} and type {code}",
        )
    expected = HEADER.size + sequences * 12 + bounds * 8
    if size < expected:
        raise DataError(
            f"{idx_path} is truncated", asked=f"{expected} bytes", found=f"{size} bytes"
        )
    content = np.memmap(idx_path, np.uint8, mode="r", offset=HEADER.size)
    lengths = content[: 4 * sequences].view("<i4").astype(np.int64)
    pointers = content[4 * sequences : 12 * sequences].view("<i8")
    documents = content[12 * sequences : 12 * sequences + 8 * bounds].view("<i8")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if sequences else 0
    if not total or not np.array_equal(pointers, starts * dtype.itemsize):
        raise DataError(f"{idx_path} is empty, or its sequences do not stand one behind the other")
    in_range = documents.min(initial=0) >= 0 and documents.max(initial=0) <= sequences
    if not in_range:
        raise DataError(f"{idx_path} is damaged: a document lies beyond its {sequences} sequences")
    found = bin_path.stat().st_size
    if found != total * dtype.itemsize:
        asked = f"{total * dtype.itemsize} bytes ({idx_path})"
        wrong = "truncated" if found < total * dtype.itemsize else "too long"
        raise DataError(f"{bin_path} is {wrong}", asked=asked, found=f"{found} bytes")
    offsets = np.append(starts, total)[documents]
    # Empty documents have no tokens and no start; the first start is 0 in any case.
    rising = np.unique(np.append(offsets[offsets < total], 0))
    return ForeignTokens(str(bin_path), dtype, total, rising)
