"""Reads documents from text, JSON lines, Parquet and Arrow files.

A *document* is one text or one conversation. A *row* is a document as stored in a file: a whole
text file, or each part if a separator splits it; a line of JSON lines; a row of a table. Rows are
numbered from 0 in each file, including empty ones, so a reader can continue after any of them.

A *chunk* is a group of rows that one process handles at a time. Cutting a file into chunks is
quick; the slow work (JSON, tokens) is done by the process that gets the chunk.
"""

import io
import os
import reprlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.conversation import ChatFields
from spmdtrain.data.chats.json_texts import are_messages, messages_in
from spmdtrain.data.texts.compressed import compression_of, opened, without_compression
from spmdtrain.data.texts.files import decode, find_files, parse_json, read_json
from spmdtrain.data.texts.other_kinds import LOOKED_AT, refuse_other_kinds
from spmdtrain.data.texts.parquet_columns import arrow_rows, no_field, parquet_rows

CHUNK_BYTES = 2**18  # approximate text per chunk: a fraction of a second's work
FORMATS = {  # the ending of a name -> the format; other names are text
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


COLUMNS = (".csv", ".tsv")  # endings of tables in text, which are not read


@dataclass(frozen=True)
class Chunk:
    """A chunk of consecutive rows of one file."""

    path: str
    first: int  # the index of the first row
    rows: list  # JSON objects as bytes, or values of the field
    read: int  # bytes of the file on disk up to here


class RowsWanted(NamedTuple):
    """The arguments of `read_chunks`, which each format needs some of."""

    path: str
    field: str | ChatFields
    split_on: str | None
    skip: int


def find_inputs(patterns: Iterable[str]) -> list[str]:
    """Returns the files of documents that paths and globs name.

    A folder written by `datasets.Dataset.save_to_disk` names its Arrow files, in order. Raises
    DataError as `find_files` does.
    """
    named: list[str] = []
    for pattern in patterns:
        folder = os.path.expanduser(pattern)
        if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
            splits = sorted(state.parent.name for state in Path(folder).glob("*/state.json"))
            raise DataError(
                f"{pattern} holds several splits of a dataset",
                found=", ".join(splits),
                fix=os.path.join(pattern, splits[0]) if splits else "",
            )
        if os.path.isfile(os.path.join(folder, "state.json")):
            named += _arrow_files(Path(folder))
        else:
            named.append(pattern)
    return find_files(named)


def _arrow_files(folder: Path) -> list[str]:
    """Returns the Arrow files of a dataset that was saved to `folder`.

    Raises DataError if a file is missing or outside the folder, or if a separate file selects the
    rows: since 2.0 `datasets` writes the selected rows themselves when it saves.
    """
    path = folder / "state.json"
    state = read_json(str(path))
    try:
        names = [file["filename"] for file in state["_data_files"]]
        has_indices = bool(state.get("_indices_data_files"))
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is not the state of a saved dataset") from None
    if has_indices:
        code = f"import datasets as d; d.load_from_disk({str(folder)!r})"
        code += f".flatten_indices().save_to_disk({str(folder) + '-rows'!r})"
        raise DataError(
            f"{path} chooses rows by _indices_data_files, which cannot be read",
            fix=f"python -c {shlex.quote(code)}",
        )
    for name in names:
        if not isinstance(name, str) or os.path.isabs(name) or ".." in Path(name).parts:
            raise DataError(f"{path} names a file outside its folder", found=f"{name!r:.200}")
        if not os.path.isfile(folder / name):
            raise DataError(f"{path} names a missing file", found=name)
    return [str(folder / name) for name in names]


def format_of(path: str) -> str:
    """Returns "text", "jsonl", "parquet" or "arrow", by the ending of the name."""
    return FORMATS.get(os.path.splitext(without_compression(path))[1].lower(), "text")


def _refuse_columns(path: str) -> None:
    """Raises DataError for a table in text form: it would be one document, commas and all."""
    ending = os.path.splitext(without_compression(path))[1].lower()
    if ending in COLUMNS:
        raise DataError(
            f"{path} is a table: all of its columns and rows would be one text",
            fix="the same table as .jsonl or .parquet, or a copy that ends in .txt",
        )


def command_to_prepare(path: str) -> str:
    """Returns the command that makes a token file next to a file of documents."""
    out = os.path.splitext(without_compression(path))[0] + "_tokens"
    return f"spmdtrain data prepare {shlex.quote(path)} --out {shlex.quote(out)}"


def read_chunks(
    path: str, field: str | ChatFields, split_on: str | None = None, skip: int = 0
) -> Iterator[Chunk]:
    """Returns the rows of a file from the row `skip` on, chunk by chunk.

    `field` says which columns to read from a table. `split_on` separates the rows of a text file.
    Raises DataError if the file cannot be read.
    """
    _refuse_columns(path)
    return READERS[format_of(path)](RowsWanted(path, field, split_on, skip))


def values_of(chunk: Chunk, field: str | ChatFields) -> list:
    """Returns the field's value in each row of a chunk; None for an empty row.

    The value of ChatFields is an object. Raises DataError, with the line number, if a line has no
    such field.
    """
    if format_of(chunk.path) != "jsonl":
        return chunk.rows
    numbered = enumerate(chunk.rows, chunk.first + 1)
    return [_value_of_line(line, f"{chunk.path}:{number}", field) for number, line in numbered]


def lines_of_separator(files: Iterable[str], split_on: str | None) -> list[str]:
    """Returns a line if `split_on` is set, but occurs in none of the text files.

    It reads each of them up to the first separator.
    """
    if split_on is None:
        return []
    texts = [file for file in files if format_of(file) == "text"]
    named = f"--split-on {split_on!r:.60}"
    if not texts:
        return [f"{named} is for text files, and none of these is one"]
    for file in texts:
        rows = (row for chunk in _text_chunks(file, split_on, 0) for row in chunk.rows)
        if len(list(islice(rows, 2))) > 1:
            return []
    whole = "which is one document" if len(texts) == 1 else "each of which is one document"
    return [f"{named} is nowhere in {len(texts)} text file{'s'[: len(texts) > 1]}, {whole}"]


def texts_of(chunk: Chunk, field: str) -> Iterator[tuple[str, int]]:
    """Yields the text of each row of a chunk, "" for an empty row, and its bytes of UTF-8.

    Raises DataError, with file and row, if a value is not a text.
    """
    for number, value in enumerate(values_of(chunk, field), chunk.first + 1):
        text = "" if value is None else value
        where = f"{chunk.path}: {field!r} of row {number}"
        if not isinstance(text, str):
            fix = f"{command_to_prepare(chunk.path)} --chat" if are_messages(text) else ""
            raise DataError(f"{where} is not a text", found=f"{reprlib.repr(text):.60}", fix=fix)
        try:
            yield text, len(text.encode())
        except UnicodeEncodeError as error:
            wrong = f"half a surrogate pair at position {error.start}"
            raise DataError(f"{where} is not a text: {wrong}") from None


def texts_in(files: Iterable[str], field: str, split_on: str | None = None) -> Iterator[str]:
    """Yields every text in files of documents. Raises DataError if a document is not a text."""
    for file in files:
        for chunk in read_chunks(file, field, split_on):
            yield from (text for text, size in texts_of(chunk, field) if size)


def texts_to_learn(
    files: Iterable[str],
    field: str,
    split_on: str | None,
    advance: Callable[[str, int], None] | None = None,
) -> Iterator[str]:
    """Yields what a tokenizer learns from: every text, and those in each message.

    `advance(file, bytes read from it)` is called from time to time. Raises DataError, with file and
    row, if a document is neither a text nor a conversation.
    """
    for file in files:
        for chunk in read_chunks(file, field, split_on):
            for number, value in enumerate(values_of(chunk, field), chunk.first + 1):
                messages = messages_in(value) if isinstance(value, str) else value
                if messages is None:
                    yield value or ""
                elif are_messages(messages):
                    yield from texts_of_messages(messages)
                elif messages:
                    where = f"{chunk.path}: {field!r} of row {number}"
                    raise DataError(
                        f"{where} is neither a text nor messages",
                        found=f"{reprlib.repr(value):.60}",
                    )
            if advance:
                advance(file, chunk.read)


def texts_of_messages(messages: list) -> Iterator[str]:
    """Yields the texts in a conversation: roles, contents, and parts of contents."""
    for message in messages:
        if isinstance(message, dict):
            yield from (text for text in message.values() if isinstance(text, str))
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text


def _value_of_line(line: bytes, where: str, field: str | ChatFields) -> Any:
    if not line.strip():
        return None
    if where.endswith(":1") and line.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise _array(where.removesuffix(":1"))
    row = parse_json(line, where, "a line of JSON")
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object", found=f"{line[:40]!r}")
    names = field.chosen(row) if isinstance(field, ChatFields) else [field]
    if names is None or not set(names).issubset(row):
        is_meant = _is_text if isinstance(field, str) else are_messages
        meant = {name: value for name, value in row.items() if is_meant(value)}
        by_length = sorted(meant, key=lambda name: -len(meant[name]))
        raise no_field(where, field, row, by_length)
    return row[field] if isinstance(field, str) else {name: row[name] for name in names}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _array(path: str) -> DataError:
    """Returns the error for a file that is one JSON array, with a command to convert it."""
    opening = {
        "": f"open({path!r}, 'rb')",
        ".gz": f"__import__('gzip').open({path!r})",
        ".zst": f"__import__('zstandard').open({path!r})",
    }[compression_of(path)]
    code = f"import json; [print(json.dumps(row)) for row in json.load({opening})]"
    lines = f"{without_compression(path)}.lines.jsonl"
    return DataError(
        f"{path} is one JSON array, and not an object on each line",
        fix=f"python -c {shlex.quote(code)} > {shlex.quote(lines)}",
    )


# --- text and lines -----------------------------------------------------------------------------


def _text_chunks(path: str, split_on: str | None, skip: int) -> Iterator[Chunk]:
    with opened(path) as (file, raw):
        refuse_other_kinds(file.peek(LOOKED_AT), path)
        if split_on is None:
            content = file.read()
            if skip == 0:
                yield Chunk(path, 0, [decode(content, path)], raw.tell())
            return
        rows: list[str | None] = []
        number = 0  # index of the next row
        size = 0
        for offset, content in _pieces(file, _separator(split_on)):
            if number >= skip:
                # A line break after the last separator is not a document.
                rows.append(decode(content, path, offset) if content.strip() else None)
                size += len(content)
            number += 1
            if size >= CHUNK_BYTES:
                yield Chunk(path, number - len(rows), rows, raw.tell())
                rows = []
                size = 0
        if rows:
            yield Chunk(path, number - len(rows), rows, raw.tell())


def _read_text(wanted: RowsWanted) -> Iterator[Chunk]:
    return _text_chunks(wanted.path, wanted.split_on, wanted.skip)


def _separator(split_on: str) -> bytes:
    if not split_on:
        raise DataError("--split-on is empty: it separates no documents")
    try:
        return split_on.encode()
    except UnicodeEncodeError:
        raise DataError(f"--split-on {split_on!r:.60} is not UTF-8") from None


def _pieces(file: io.BufferedReader, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, content) of the parts between the separators of a file."""
    offset = 0  # of `held` in the file
    held = bytearray()
    searched = 0  # bytes of `held` in which no separator begins
    while block := file.read(CHUNK_BYTES):
        held += block
        done = 0
        while (at := held.find(separator, max(done, searched))) >= 0:
            yield offset + done, bytes(held[done:at])
            done = at + len(separator)
        del held[:done]
        offset += done
        # A separator may span two blocks.
        searched = max(len(held) - len(separator) + 1, 0)
    yield offset, bytes(held)


def _read_lines(wanted: RowsWanted) -> Iterator[Chunk]:
    path, skip = wanted.path, wanted.skip
    with opened(path) as (file, raw):
        refuse_other_kinds(file.peek(LOOKED_AT), path)
        first = 0
        while lines := file.readlines(CHUNK_BYTES):
            after = first + len(lines)
            if after > skip:
                begin = max(skip, first)
                yield Chunk(path, begin, lines[begin - first :], raw.tell())
            first = after


def _read_parquet(wanted: RowsWanted) -> Iterator[Chunk]:
    for first, rows, read in parquet_rows(wanted.path, wanted.field, wanted.skip, CHUNK_BYTES):
        yield Chunk(wanted.path, first, rows, read)


def _read_arrow(wanted: RowsWanted) -> Iterator[Chunk]:
    for first, rows, read in arrow_rows(wanted.path, wanted.field, wanted.skip, CHUNK_BYTES):
        yield Chunk(wanted.path, first, rows, read)


# The format of a file (`format_of`) -> how its rows are read.
READERS: Mapping[str, Callable[[RowsWanted], Iterator[Chunk]]] = {
    "text": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
