"""Opens files that may be compressed, and refuses truncated ones."""

import gzip
import io
import os
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.data.texts.files import import_for

COMPRESSIONS = (".gz", ".zst")
# Endings of packed files that are not read, and the commands that unpack them.
UNREAD = {
    ".bz2": "bunzip2",
    ".xz": "unxz",
    ".lz4": "unlz4",
    ".zip": "unzip",
    ".tar": "tar -xf",
    ".tar.gz": "tar -xzf",
    ".tgz": "tar -xzf",
    ".tbz2": "tar -xjf",
    ".tbz": "tar -xjf",
    ".txz": "tar -xJf",
    ".tzst": "tar --zstd -xf",
    ".lzo": "lzop -d",
    ".tar.zst": "tar --zstd -xf",
    ".7z": "7z x",
    ".br": "brotli -d",
    ".lzma": "unlzma",
    ".rar": "unrar x",
    ".z": "uncompress",
}

# BGZF (bgzip) is gzip in small members that declare their size; the last one is empty.
BGZF_BEGINS = b"\x1f\x8b\x08\x04"
BGZF_FIELD = b"\x06\0BC\x02\0"  # at byte 10
BGZF_ENDS = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")

# RFC 8878. Numbers are little-endian.
FRAME = 0xFD2FB528
LONGEST_WINDOW = 2**31  # bytes: `zstd --long=31`, used for archives of forums
SKIPPABLE = range(0x184D2A50, 0x184D2A60)


def compression_of(path: str) -> str:
    """Returns the ending in COMPRESSIONS of a compressed file's name, or ""."""
    ending = os.path.splitext(path)[1].lower()
    return ending if ending in COMPRESSIONS else ""


def without_compression(path: str) -> str:
    """Returns the name of the unpacked file."""
    return path[: len(path) - len(compression_of(path))]


@contextmanager
def opened(path: str) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Opens a file that may be compressed; yields it and the raw file on disk.

    Turns read errors into a DataError. A compressed file that is empty or ends in the middle of a
    frame is an error.
    """
    refuse_unread(path)
    broken = [OSError, EOFError, zlib.error]
    compression = compression_of(path)
    try:
        with open(path, "rb") as raw:
            if compression and os.fstat(raw.fileno()).st_size == 0:
                raise EOFError("the compressed file is empty")
            if compression == ".gz":
                _check_bgzf(raw)
                # It has the methods of a raw stream without being one.
                members: Any = gzip.GzipFile(fileobj=raw)
                yield io.BufferedReader(members), raw
            elif compression == ".zst":
                zstandard = import_for("zstandard", path)
                broken.append(zstandard.ZstdError)
                _check_frames(raw)
                unpacker = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
                reader = unpacker.stream_reader(raw, read_across_frames=True)
                yield io.BufferedReader(reader), raw
            else:
                yield raw, raw
    except tuple(broken) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from None


def refuse_unread(path: str) -> None:
    """Raises DataError for a file in an unsupported packed format."""
    for ending, command in UNREAD.items():
        if path.lower().endswith(ending):
            written_ending = path[-len(ending) :]
            raise DataError(
                f"{path} is packed as {written_ending}, which cannot be read",
                fix=f"{command} {shlex.quote(path)}",
            )


def _check_bgzf(raw: io.BufferedReader) -> None:
    """Raises EOFError if a BGZF file ends between members, which gzip accepts as complete."""
    first = os.pread(raw.fileno(), 16, 0)
    if not first.startswith(BGZF_BEGINS) or first[10:] != BGZF_FIELD:
        return
    size = os.fstat(raw.fileno()).st_size
    last = os.pread(raw.fileno(), len(BGZF_ENDS), max(size - len(BGZF_ENDS), 0))
    if last != BGZF_ENDS:
        raise EOFError("the compressed file ends early: it lacks the last member of bgzip")


def _check_frames(raw: io.BufferedReader) -> None:
    """Raises EOFError if a zstandard file ends within a frame.

    The package accepts it as the end of the text. Only block sizes are read. Anything that is not a
    frame is left to the package, which refuses it.
    """
    size = os.fstat(raw.fileno()).st_size
    place = 0
    while place < size:
        magic = _number(raw, place, 4)
        if magic in SKIPPABLE:
            place += 8 + _number(raw, place + 4, 4)
        elif magic == FRAME:
            place = _end_of_frame(raw, place)
        else:
            return
    if place > size:
        raise EOFError("the compressed file ends early")


def _end_of_frame(raw: io.BufferedReader, place: int) -> int:
    """Returns the end that the frame beginning at `place` declares."""
    descriptor = _number(raw, place + 4, 1)
    is_single_segment = descriptor >> 5 & 1
    content_size = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    dictionary_id = (0, 1, 2, 4)[descriptor & 3]
    place += 4 + 1 + (1 - is_single_segment) + dictionary_id + content_size
    is_last = 0
    while not is_last:
        header = _number(raw, place, 3)
        is_last, kind, length = header & 1, header >> 1 & 3, header >> 3
        place += 3 + (1 if kind == 1 else length)  # 1: one byte repeated `length` times
    has_checksum = descriptor >> 2 & 1
    return place + 4 * has_checksum


def _number(raw: io.BufferedReader, place: int, length: int) -> int:
    content = os.pread(raw.fileno(), length, place)
    if len(content) < length:
        raise EOFError("the compressed file ends early")
    return int.from_bytes(content, "little")
