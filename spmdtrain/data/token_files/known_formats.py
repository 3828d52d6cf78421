"""Recognise files of other kinds by their first bytes, lest they be read as token ids."""

import struct
from pathlib import Path

import numpy as np

from spmdtrain.data.token_files.rows import reading

LOOKED_AT = 4096  # bytes
NUMPY = "an array of numpy (.npy)"
# (first bytes, what has them)
MAGICS = (
    (b"\x93NUMPY", NUMPY),
    (b"\x1f\x8b\x08", "compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstandard"),
    (b"\xfd7zXZ\x00", "compressed with xz"),
    (b"\x04\x22\x4d\x18", "compressed with lz4"),
    (b"BZh", "compressed with bzip2"),
    (b"PK\x03\x04", "a zip file, as .npz and .pt are"),
    (b"PK\x05\x06", "a zip file, as .npz and .pt are"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"MMIDIDX\x00\x00", "the .idx of a Megatron token file"),
    (b"TNTIDX\x00\x00", "the .idx of a fairseq token file"),
    (b"LITPKDS", "a packed data set of lit-gpt"),
    (b"\x80\x02\x8a\x0a", "a file of torch.save"),
    (b"GGUF", "a GGUF model"),
    (b"SQLite format 3\x00", "an SQLite file"),
    (b"\x7fELF", "a program"),
    (b"%PDF-", "a PDF file"),
    (b"\x89PNG\r\n", "a picture"),
)
TEXT_CONTROLS = frozenset(b"\t\n\v\f\r\x1b")


def kind_of_file(path: Path, size: int) -> str | None:
    """Return what a file is that holds no bare ids, for a message; None: nothing known."""
    with reading(path), path.open("rb") as file:
        first = file.read(LOOKED_AT)
        file.seek(max(size - 1, 0))
        last = file.read(1)
    for magic, kind in MAGICS:
        if first.startswith(magic):
            return kind
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and last == b".":
        return "a pickle of Python"
    if first[257:262] == b"ustar":
        return "a tar file"
    if _is_safetensors(first, size):
        return "a file of safetensors"
    if _is_chunk_of_samples(first, size):
        return "a chunk of samples with their offsets, as litdata writes"
    if _is_text(first):
        return "plain text"
    return None


def _is_safetensors(first: bytes, size: int) -> bool:
    if len(first) < 10:
        return False
    (header,) = struct.unpack("<Q", first[:8])
    return first[8:9] == b"{" and 2 <= header <= size - 8


def _is_chunk_of_samples(first: bytes, size: int) -> bool:
    """A number n, and n + 1 offsets of which the first is where they end, all uint32."""
    numbers = np.frombuffer(first[: len(first) // 4 * 4], "<u4").astype(np.int64)
    if len(numbers) < 3:
        return False
    count = int(numbers[0])
    offsets = numbers[1 : count + 2]
    begins_and_rises = offsets[0] == 4 * (count + 2) and (np.diff(offsets) > 0).all()
    whole = count + 2 <= len(numbers)
    return bool(count and begins_and_rises and (not whole or offsets[-1] == size))


def _is_text(first: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters: ids have a 0 or a stray byte soon."""
    if len(first) < 8:
        return False
    try:
        first.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(first) - 3 or len(first) < LOOKED_AT:  # not a character cut in two
            return False
    return all(byte >= 32 or byte in TEXT_CONTROLS for byte in first) and 127 not in first
