"""Reads files of documents and of ids in the plainest way, whole and strictly.

It is what `check` compares the framework with, and shares no code with it.
"""

import contextlib
import gzip
import json
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from fuzz_data.case import Case
from fuzz_data.formats import BGZF, JSONL_ENDINGS, LLMC, MEGATRON, Made

# With which an Arrow stream ends, now and before Arrow 0.15.
ENDS_OF_STREAM = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")


class Unreadable(Exception):
    """A file does not hold what its name says, whole."""


class Ids(NamedTuple):
    """What a token file holds."""

    ids: np.ndarray  # int64
    starts: np.ndarray | None  # int64, rising; None: it does not say
    loss: np.ndarray  # uint8
    vocab: int | None = None


# --- documents ----------------------------------------------------------------------------------


def documents_of(case: Case, made: Made) -> list:
    """Return the documents of all files that a command names; None where a row is empty.

    Raises Unreadable where a file is not whole.
    """
    found = []
    for path in made.paths:
        found += _rows(case, made, path)
    return found


def _rows(case: Case, made: Made, path: Path) -> list:
    if (path / "state.json").is_file():
        return _saved_rows(made, path)
    if not path.is_file():
        raise Unreadable("no file")
    if path in made.unreadable:
        raise Unreadable("as it is told")
    name = path.name.lower()
    stem = name
    for ending in (".gz", ".zst"):
        stem = stem.removesuffix(ending)
    kind = Path(stem).suffix
    try:
        if kind == ".parquet":
            if path.read_bytes().count(b"PAR1") > 2:
                raise Unreadable("two files in one")
            table = pyarrow.parquet.read_table(path, columns=[made.field_name])
            if pyarrow.parquet.read_metadata(path).num_rows != len(table):
                raise Unreadable("another number of rows")
            return _column(table, made.field_name)
        if kind == ".arrow":
            return _arrow_rows(path.read_bytes(), made.field_name)
        content = _unpacked(path.read_bytes(), Path(name).suffix)
        if kind in JSONL_ENDINGS:
            return [_value(line, made.field_name) for line in _lines(content)]
        if case.chat:
            raise Unreadable("a text file holds no messages")
        return _pieces(content.decode("utf-8"), case.split_on)
    except Unreadable:
        raise
    except (ValueError, OSError, KeyError, RecursionError, pyarrow.ArrowException) as error:
        raise Unreadable(str(error)) from None


def _unpacked(content: bytes, ending: str) -> bytes:
    """Return what all members of a file hold, each of which must be whole."""
    if ending not in (".gz", ".zst"):
        return content
    is_bgzf = content.startswith(BGZF[:4]) and content[10 : len(BGZF)] == BGZF[10:]
    if is_bgzf and not content.endswith(BGZF + b"\x1b\0\3\0" + bytes(8)):
        raise Unreadable("it lacks its last member")
    whole = b""
    is_first = True
    # Zeros may follow the last member of a .gz, as on a tape.
    while is_first or (content.strip(b"\0") if ending == ".gz" else content):
        is_first = False
        if ending == ".gz":
            member = zlib.decompressobj(31)
        elif content[1:4] == b"\x2a\x4d\x18" and 0x50 <= content[0] < 0x60:
            end = 8 + int.from_bytes(content[4:8], "little")
            if len(content) < end:
                raise Unreadable("it ends early")
            content = content[end:]
            continue
        else:
            member = zstandard.ZstdDecompressor().decompressobj()
        try:
            whole += member.decompress(content)
        except (zlib.error, zstandard.ZstdError) as wrong:
            if ending == ".gz" and "header" in str(wrong):
                return whole + _below_header(content)
            raise Unreadable(str(wrong)) from None
        if not member.eof:
            raise Unreadable("it ends early")
        content = member.unused_data
    return whole


def _below_header(content: bytes) -> bytes:
    """Return what members hold, of which one has a header that zlib alone refuses.

    What it says besides the content is of no use: the content has a check sum of its own.
    """
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as wrong:
        raise Unreadable(str(wrong)) from None


def _pieces(text: str, separator: str | None) -> list:
    if separator is None:
        return [text or None]
    pieces = text.encode().split(separator.encode())
    return [piece.decode() if piece.strip() else None for piece in pieces]


def _lines(content: bytes) -> list[bytes]:
    return content.split(b"\n")


def _value(line: bytes, field: str) -> Any:
    if not line.strip():
        return None
    row = json.loads(line)
    if not isinstance(row, dict) or field not in row:
        raise Unreadable("no such field")
    return row[field]


def _column(table: pyarrow.Table, field: str) -> list:
    if table.schema.names.count(field) != 1:
        raise Unreadable("no such column")
    column = table.column(field)
    column.validate(full=True)  # what others hold is read by nobody
    return column.to_pylist()


def _arrow_rows(content: bytes, field: str) -> list:
    source = pyarrow.BufferReader(content)
    if content.startswith(b"ARROW1") and content.count(b"ARROW1") > 2:
        raise Unreadable("two files in one")
    try:
        reader = pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        return _column(pyarrow.ipc.open_file(pyarrow.BufferReader(content)).read_all(), field)
    batches = []
    end = source.tell()
    with contextlib.suppress(StopIteration):
        while True:
            batches.append(reader.read_next_batch())
            end = source.tell()
    if content[end:] not in ENDS_OF_STREAM:
        raise Unreadable("the stream ends early")
    return _column(pyarrow.Table.from_batches(batches, reader.schema), field)


def _saved_rows(made: Made, folder: Path) -> list:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [each["filename"] for each in state["_data_files"]]
        indices = [each["filename"] for each in state.get("_indices_data_files") or []]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        raise Unreadable("no state of a saved dataset") from None
    rows = []
    for name in [*names, *indices]:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise Unreadable("no such file of a dataset")
    for name in names:
        content = (folder / name).read_bytes()
        if not name.endswith(".arrow"):
            raise Unreadable("no Arrow file")
        rows += _guarded(content, made.field_name)
    if not indices:
        return rows
    chosen = [i for name in indices for i in _guarded((folder / name).read_bytes(), "indices")]
    return [rows[index] for index in chosen]


def _guarded(content: bytes, field: str) -> list:
    try:
        return _arrow_rows(content, field)
    except (ValueError, OSError, KeyError, pyarrow.ArrowException) as error:
        raise Unreadable(str(error)) from None


# --- ids ----------------------------------------------------------------------------------------


def ids_of(path: Path) -> Ids:
    """Return what a token file of ours holds. Raises Unreadable where its files do not fit."""
    try:
        sidecar = json.loads(_content(path.with_suffix(".json")).decode("utf-8"))
        dtype = {"uint16": "<u2", "uint32": "<u4"}[sidecar["dtype"]]
        ids = _row(path, dtype)
        starts = _row(path.with_suffix(".idx"), "<i8")
        loss = np.ones(len(ids), np.uint8)
        if "loss_sha256" in sidecar:
            loss = _row(path.with_suffix(".loss"), "u1")
        if not len(ids) == len(loss) == sidecar["tokens"] or len(starts) != sidecar["documents"]:
            raise Unreadable("its sizes do not fit")
        return Ids(ids.astype(np.int64), starts, loss, sidecar["vocab"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, AttributeError) as error:
        raise Unreadable(str(error)) from None


def _content(path: Path) -> bytes:
    if not path.is_file():  # to read a pipe would wait for ever
        raise Unreadable("no file")
    return path.read_bytes()


def _row(path: Path, dtype: str) -> np.ndarray:
    content = _content(path)
    if len(content) % np.dtype(dtype).itemsize:
        raise Unreadable("half an element")
    return np.frombuffer(content, dtype)


def foreign_ids_of(case: Case, path: Path) -> Ids:
    """Return what a token file of another program holds. Raises Unreadable."""
    try:
        content = _content(path)
        starts = None
        dtype = "<u2"
        if case.format in LLMC:
            magic, _, dtype, _ = LLMC[case.format]
            header = np.frombuffer(content[:1024], "<i4")
            content = content[1024:]
            if header[0] != magic or len(content) != header[2] * np.dtype(dtype).itemsize:
                raise Unreadable("another header")
        elif path.with_suffix(".idx").exists():  # without one it is a bare row
            starts, dtype = _megatron_starts(_content(path.with_suffix(".idx")))
        if not content or len(content) % np.dtype(dtype).itemsize:
            raise Unreadable("half an id")
        ids = np.frombuffer(content, dtype).astype(np.int64)
        if starts is not None:
            if starts[-1] != len(ids):
                raise Unreadable("another size than its index says")
            starts = np.unique(np.append(starts[:-1][starts[:-1] < len(ids)], 0))
        return Ids(ids, starts, np.ones(len(ids), np.uint8))
    except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as error:
        raise Unreadable(str(error)) from None


def _megatron_starts(index: bytes) -> tuple[np.ndarray, str]:
    """Return the offsets of documents and the end of the last sequence, and the type of ids."""
    magic, version, code, sequences, bounds = struct.unpack_from("<9sQBQQ", index)
    if magic != b"MMIDIDX\0\0" or version != 1:
        raise Unreadable("no index")
    sizes = np.frombuffer(index, "<i4", sequences, 34).astype(np.int64)
    documents = np.frombuffer(index, "<i8", bounds, 34 + 12 * sequences)
    if (sizes < 0).any() or (documents < 0).any() or (np.diff(documents) < 0).any():
        raise Unreadable("an index that falls")
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return np.append(offsets[documents], offsets[-1]), MEGATRON[code]
