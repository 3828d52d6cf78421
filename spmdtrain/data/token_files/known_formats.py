"""Recognises other kinds of files by their first bytes, so they are not read as token ids."""

import struct
from pathlib import Path

import numpy as np

from spmdtrain.data.texts.other_kinds import LOOKED_AT, MAGICS, encoding_of
from spmdtrain.data.token_files.rows import reading

HEADER = 1024  # bytes of the header in known token files
CERTAIN = 6  # a match of this many bytes is no accident
# With a vocabulary of about this size ids are bytes, and a row of them looks like UTF-16.
BYTE_VOCAB = 512
TEXT_CONTROLS = frozenset(b"\t\n\v\f\r\x1b")


def kind_of_file(path: Path, size: int, vocab: int, *, certain: bool = False) -> str | None:
    """Returns the kind of a file that does not hold bare ids, for a message; None: unknown.

    With `certain`, the user has said that it holds ids: then only kinds that ids cannot look like.
    """
    with reading(path), path.open("rb") as file:
        first = file.read(LOOKED_AT)
        file.seek(max(size - 1, 0))
        last = file.read(1)
    for magic, kind in MAGICS:
        if first.startswith(magic) and (len(magic) >= CERTAIN or not certain):
            return kind
    if certain:
        return None
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
    if vocab > BYTE_VOCAB and (name := encoding_of(first)):
        return f"text in {name}"
    if _has_header(first):
        return "ids with a header, which this program does not know"
    return None


def _has_header(first: bytes) -> bool:
    """Returns True if the first KiB is a few numbers and zeros, unlike what follows."""
    row = np.frombuffer(first[: len(first) // HEADER * HEADER], np.uint8).reshape(-1, HEADER)
    rest = first[HEADER:]
    if not len(row) or rest.count(0) > len(rest) // 2:  # zeros are just as common later
        return False
    ends_in_zeros = np.count_nonzero(row[:, HEADER // 4 :], axis=1) == 0
    return bool(ends_in_zeros[0] and first[:HEADER].strip(b"\0") and not ends_in_zeros[1:].any())


def _is_safetensors(first: bytes, size: int) -> bool:
    if len(first) < 10:
        return False
    (header,) = struct.unpack("<Q", first[:8])
    return first[8:9] == b"{" and 2 <= header <= size - 8


def _is_chunk_of_samples(first: bytes, size: int) -> bool:
    """Returns True if a file begins with n and n + 1 offsets, uint32, the first being their end."""
    numbers = np.frombuffer(first[: len(first) // 4 * 4], "<u4").astype(np.int64)
    if len(numbers) < 3:
        return False
    count = int(numbers[0])
    offsets = numbers[1 : count + 2]
    begins_and_rises = offsets[0] == 4 * (count + 2) and (np.diff(offsets) > 0).all()
    whole = count + 2 <= len(numbers)
    return bool(count and begins_and_rises and (not whole or offsets[-1] == size))


def _is_text(first: bytes) -> bool:
    """Returns True if bytes are UTF-8 without control characters, which ids never are for long."""
    if len(first) < 8:
        return False
    try:
        first.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(first) - 3 or len(first) < LOOKED_AT:  # not a cut character
            return False
    return all(byte >= 32 or byte in TEXT_CONTROLS for byte in first) and 127 not in first
