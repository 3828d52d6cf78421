"""Read documents from text, JSON lines, Parquet and Arrow files.

A *document* is one text, or one conversation. A *row* is what a file holds of a document: a text
file is one row, or as many as a separator cuts it into; a line is a row of JSON lines, and a row of
a table is one. Rows are numbered from 0 in each file, empty ones too, so that a reader can go on
behind any of them.

A *chunk* is some rows that one process takes at a time. Cutting a file into chunks is quick; what
takes time (JSON, tokens) is done by whoever takes the chunk.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.data.files import decode, find_files

CHUNK_BYTES = 2**18  # of text in a chunk, about: a fraction of a second's work
CHUNK_ROWS = 1000  # of a table in a chunk
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Chunk:
    """Some consecutive rows of one file."""

    path: str
    first: int  # the number of the first row
    rows: list  # bytes of a JSON object each, or values of the field
    read: int  # bytes of the file up to here, as they lie on disk


def find_inputs(patterns: Iterable[str]) -> list[str]:
    """Return the files of documents that paths and globs name.

    A folder that `datasets.Dataset.save_to_disk` has written names the Arrow files in it, in their
    order. Raises DataError as `find_files` does.
    """
    named: list[str] = []
    for pattern in patterns:
        folder = Path(pattern).expanduser()
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
            raise DataError(
                f"{pattern} holds several splits of a dataset",
                found=", ".join(splits),
                fix=os.path.join(pattern, splits[0]) if splits else "",
            )
        if (folder / "state.json").is_file():
            named += _arrow_files(folder)
        else:
            named.append(pattern)
    return find_files(named)


def _arrow_files(folder: Path) -> list[str]:
    """Return the Arrow files of a dataset that was saved to `folder`."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        names = [each["filename"] for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not the state of a saved dataset") from None
    return [str(folder / name) for name in names]


def format_of(path: str) -> str:
    """Return "text", "jsonl", "parquet" or "arrow", as the ending of the name says."""
    stem = path
    for ending in COMPRESSIONS:
        stem = stem.removesuffix(ending)
    return FORMATS.get(os.path.splitext(stem)[1].lower(), "text")


def read_chunks(
    path: str, field: str, split_on: str | None = None, skip: int = 0
) -> Iterator[Chunk]:
    """Yield the rows of a file from the row `skip` on.

    `field` is the column of a table that is read. `split_on` is what separates the rows of a text
    file. Raises DataError where the file cannot be read.
    """
    kind = format_of(path)
    if kind == "text":
        yield from _text_chunks(path, split_on, skip)
    elif kind == "jsonl":
        yield from _line_chunks(path, skip)
    elif kind == "parquet":
        yield from _parquet_chunks(path, field, skip)
    else:
        yield from _arrow_chunks(path, field, skip)


def values_of(chunk: Chunk, field: str) -> list:
    """Return what the field holds in each row of a chunk; None where a row is empty.

    Raises DataError, with the number of the line, where a line has no such field.
    """
    if format_of(chunk.path) != "jsonl":
        return chunk.rows
    numbered = enumerate(chunk.rows, chunk.first + 1)
    return [_value_of_line(line, f"{chunk.path}:{number}", field) for number, line in numbered]


def texts_in(
    files: Iterable[str],
    field: str,
    split_on: str | None = None,
    advance: Callable[[str, int], None] | None = None,
) -> Iterator[str]:
    """Yield every text in files of documents: the roles and contents of a conversation, each.

    `advance` is told of (file, bytes of it that were read) from time to time.
    """
    for file in files:
        for chunk in read_chunks(file, field, split_on):
            for value in values_of(chunk, field):
                if isinstance(value, str):
                    yield value
                elif isinstance(value, list):
                    yield from texts_of_messages(value)
            if advance:
                advance(file, chunk.read)


def texts_of_messages(messages: Any) -> Iterator[str]:
    """Yield the texts that a conversation holds: roles, contents, and the parts of contents."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield from (text for text in message.values() if isinstance(text, str))
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text


def _value_of_line(line: bytes, where: str, field: str) -> Any:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(f"{where} is not a line of JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object", found=f"{line[:40]!r}")
    if field not in row:
        texts = {name: value for name, value in row.items() if isinstance(value, str)}
        by_length = sorted(texts, key=lambda name: -len(texts[name]))
        raise _no_field(where, field, row, by_length)
    return row[field]


def _no_field(where: str, field: str, columns: Iterable[str], texts: Sequence[str]) -> DataError:
    """Return the error; `texts` are the columns that may have been meant, the likeliest first."""
    return DataError(
        f"{where} has no field {field!r}",
        found=", ".join(columns) or "none",
        fix=f"--field {texts[0]}" if texts else "",
    )


# --- text and lines -----------------------------------------------------------------------------


def _text_chunks(path: str, split_on: str | None, skip: int) -> Iterator[Chunk]:
    with _opened(path) as (file, raw):
        if split_on is None:
            content = file.read()
            if skip == 0:
                yield Chunk(path, 0, [decode(content, path)], raw.tell())
            return
        rows: list[str | None] = []
        number = 0  # of the next row
        size = 0
        for offset, content in _pieces(file, split_on.encode()):
            if number >= skip:
                # A line break behind the last separator is no document.
                rows.append(decode(content, path, offset) if content.strip() else None)
                size += len(content)
            number += 1
            if size >= CHUNK_BYTES:
                yield Chunk(path, number - len(rows), rows, raw.tell())
                rows = []
                size = 0
        if rows:
            yield Chunk(path, number - len(rows), rows, raw.tell())


def _pieces(file: io.BufferedIOBase, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, content) of what stands between the separators of a file."""
    offset = 0
    rest = b""
    while block := file.read(CHUNK_BYTES):
        *whole, rest = (rest + block).split(separator)
        for content in whole:
            yield offset, content
            offset += len(content) + len(separator)
    yield offset, rest


def _line_chunks(path: str, skip: int) -> Iterator[Chunk]:
    with _opened(path) as (file, raw):
        first = 0
        while lines := file.readlines(CHUNK_BYTES):
            after = first + len(lines)
            if after > skip:
                begin = max(skip, first)
                yield Chunk(path, begin, lines[begin - first :], raw.tell())
            first = after


@contextmanager
def _opened(path: str) -> Iterator[tuple[io.BufferedIOBase, io.BufferedReader]]:
    """Open a file that may be compressed; yield it and the file as it lies on disk.

    Turns what goes wrong while it is read into a DataError.
    """
    broken = [OSError, EOFError, zlib.error]
    try:
        with open(path, "rb") as raw:
            if path.endswith(".gz"):
                yield gzip.GzipFile(fileobj=raw), raw
            elif path.endswith(".zst"):
                zstandard = _import("zstandard", path)
                broken.append(zstandard.ZstdError)
                reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
                yield io.BufferedReader(reader), raw
            else:
                yield raw, raw
    except tuple(broken) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from None


# --- tables -------------------------------------------------------------------------------------


def _parquet_chunks(path: str, field: str, skip: int) -> Iterator[Chunk]:
    arrow = _import("pyarrow", path)
    parquet = _import("pyarrow.parquet", path)
    size = os.path.getsize(path)
    with _reading_table(path, arrow), parquet.ParquetFile(path) as table:
        if field not in table.schema_arrow.names:
            raise _no_column(path, field, table.schema_arrow)
        batches = table.iter_batches(CHUNK_ROWS, columns=[field])
        yield from _table_chunks(path, batches, skip, size, table.metadata.num_rows)


def _arrow_chunks(path: str, field: str, skip: int) -> Iterator[Chunk]:
    arrow = _import("pyarrow", path)
    size = os.path.getsize(path)
    with _reading_table(path, arrow), arrow.memory_map(path) as mapped:
        try:
            stream = arrow.ipc.open_stream(mapped)  # as `datasets` writes it
            batches = list(stream)  # of a mapped file: only where they lie
        except arrow.ArrowInvalid:
            stream = arrow.ipc.open_file(mapped)
            batches = [stream.get_batch(index) for index in range(stream.num_record_batches)]
        if field not in stream.schema.names:
            raise _no_column(path, field, stream.schema)
        columns = (batch.select([field]) for batch in batches)
        total = sum(batch.num_rows for batch in batches)
        yield from _table_chunks(path, columns, skip, size, total)


def _table_chunks(
    path: str, batches: Iterable, skip: int, size: int, total: int
) -> Iterator[Chunk]:
    """Yield the rows of record batches of one column, at most `CHUNK_ROWS` at a time.

    `size` is that of the file in bytes, `total` its number of rows.
    """
    first = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, batch.num_rows - begin)
            unread = max(skip - first, 0)
            if unread < rows:
                part = batch.slice(begin + unread, rows - unread).column(0).to_pylist()
                yield Chunk(path, first + unread, part, size * (first + rows) // total)
            first += rows


def _no_column(path: str, field: str, schema) -> DataError:
    texts = [column.name for column in schema if "string" in str(column.type)]
    return _no_field(path, field, schema.names, texts)


@contextmanager
def _reading_table(path: str, arrow) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0]
        raise DataError(f"cannot read {path}: {first_line}") from None


def _import(name: str, path: str):
    """Import a package of the extra `data`, which `path` needs."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise DataError(
            f"{path} needs the package `{package}`, which is not installed",
            fix="pip install 'spmdtrain[data]'",
        ) from None
