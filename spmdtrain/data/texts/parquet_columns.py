"""Reads columns of Parquet and Arrow files, a few rows at a time.

For a text it is one column, whose values are the rows. For a conversation it is the fields of
ChatFields that a table has; a row is then an object, or None if it holds no conversation.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.conversation import ChatFields
from spmdtrain.data.texts.files import import_for

MOST_ROWS = 1000  # taken at a time
FILE_MAGIC = b"ARROW1"
PARQUET_MAGIC = b"PAR1"
BLOCK = 2**20  # bytes searched at a time
JOINED = "it is two files in one; only one of them would be read"
# The end of a stream of record batches, as written today and before Arrow 0.15.
STREAM_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")

UNREADABLE = (ValueError, OverflowError, RecursionError)  # Python's errors on damaged values
EXTENSION, JSON_TEXT = b"ARROW:extension:name", "arrow.json"

Parse = Callable[[Any], Any]
Rows = tuple[int, list, int]  # (index of the first row, values, bytes of the file up to here)


def parquet_rows(path: str, field: str | ChatFields, skip: int, most_bytes: int) -> Iterator[Rows]:
    """Yields the rows of a Parquet file from the row `skip` on, about `most_bytes` at a time."""
    arrow = import_for("pyarrow", path)
    parquet = import_for("pyarrow.parquet", path)
    size = os.path.getsize(path)
    with (
        _reading_table(path, arrow),
        parquet.ParquetFile(path, page_checksum_verification=True) as table,
    ):
        columns = _columns(path, field, table.schema_arrow, arrow)
        _check_alone(path, table.metadata, size)
        total = max(table.metadata.num_rows, 1)
        rows = max(min(MOST_ROWS, most_bytes * total // max(size, 1)), 1)
        done = 0
        for batch in table.iter_batches(rows, columns=columns):
            done += batch.num_rows
            held = _held(batch, field, columns)
            yield from _slices(held, done, skip, size * done // total, most_bytes)
        if done != table.metadata.num_rows:
            raise EOFError(f"it has {done} rows, but states {table.metadata.num_rows}")


def arrow_rows(path: str, field: str | ChatFields, skip: int, most_bytes: int) -> Iterator[Rows]:
    """Yields the rows of an Arrow file or stream as `parquet_rows` does."""
    arrow = import_for("pyarrow", path)
    with _reading_table(path, arrow), arrow.memory_map(path) as mapped:
        is_file = mapped.read(len(FILE_MAGIC)) == FILE_MAGIC
        mapped.seek(0)
        if is_file:
            _check_file_alone(arrow, mapped)
            reader = arrow.ipc.open_file(mapped)
            count = reader.num_record_batches
            size = mapped.size()
            batches = (
                (reader.get_batch(number), size * (number + 1) // count) for number in range(count)
            )
        else:
            reader = arrow.ipc.open_stream(mapped)  # the format of `datasets`
            batches = _batches_of_stream(reader, mapped)
        columns = _columns(path, field, reader.schema, arrow)
        done = 0
        for batch, read in batches:
            done += batch.num_rows
            held = _held(batch, field, columns)
            yield from _slices(held, done, skip, read, most_bytes)


def _batches_of_stream(reader: Any, mapped: Any) -> Iterator[tuple[Any, int]]:
    """Yields the batches of a stream and the end of each.

    Raises EOFError if the stream lacks its end marker, which Arrow accepts, or continues after it,
    as when two streams were written into one file.
    """
    end = mapped.tell()
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            break
        end = mapped.tell()
        yield batch, end
    mapped.seek(end)
    rest = mapped.size() - end
    marker = mapped.read(8)
    if not marker.startswith(STREAM_ENDS):
        raise EOFError("the stream ends early")
    if rest > 8 or marker not in STREAM_ENDS:
        raise EOFError("bytes follow the end of the stream")


def _check_alone(path: str, metadata: Any, size: int) -> None:
    """Raises EOFError if a Parquet file follows another one, which would be ignored."""
    if not metadata.num_row_groups:
        return
    last = metadata.row_group(metadata.num_row_groups - 1)
    ends = []
    for number in range(last.num_columns):
        column = last.column(number)
        first = column.dictionary_page_offset or column.data_page_offset
        ends.append(min(first, column.data_page_offset) + column.total_compressed_size)
    # Only page indexes and the footer may follow, not the end of one file and start of another.
    with open(path, "rb") as file:
        place = max(ends, default=0)
        file.seek(place)
        held = b""
        while place < size and (block := file.read(BLOCK)):
            if PARQUET_MAGIC * 2 in held + block:
                raise EOFError(JOINED)
            held = block[-2 * len(PARQUET_MAGIC) :]
            place += len(block)


def _check_file_alone(arrow: Any, mapped: Any) -> None:
    """Raises EOFError if an Arrow file follows another one, which would be ignored.

    A file without the end marker of its messages, which older programs omit, is accepted.
    """
    size = mapped.size()
    mapped.seek(max(size - len(FILE_MAGIC) - 4, 0))
    footer = int.from_bytes(mapped.read(4), "little")
    if mapped.read() != FILE_MAGIC:
        return  # the package refuses it
    mapped.seek(8)  # past the magic and its padding
    messages = arrow.ipc.MessageReader.open_stream(mapped)
    try:
        while True:
            messages.read_next_message()
    except StopIteration:
        place = mapped.tell()
    except (arrow.ArrowException, OSError):
        return
    finally:
        mapped.seek(0)
    if place + footer + 4 + len(FILE_MAGIC) < size:
        raise EOFError(JOINED)


def _held(batch: Any, field: str | ChatFields, columns: list[str]) -> Any:
    """Returns the column of a text, or the columns of a conversation as one batch."""
    return batch.column(field) if isinstance(field, str) else batch.select(columns)


def _slices(column: Any, done: int, skip: int, read: int, most_bytes: int) -> Iterator[Rows]:
    """Yields the values of a column, or of some, that ends at row `done`, from row `skip` on."""
    column.validate(full=True)
    count = len(column)
    first = done - count
    step = max(min(MOST_ROWS, most_bytes * count // max(column.nbytes, 1)), 1)
    parse = _parser(column)
    for begin in range(max(skip - first, 0), count, step):
        values = [_without_nulls(value) for value in column.slice(begin, step).to_pylist()]
        yield first + begin, values if parse is None else [parse(value) for value in values], read


def _without_nulls(value: Any) -> Any:
    """Returns a value without the nulls that a table adds, because all of its rows have the same
    keys. Those in a JSON text are the writer's own.
    """
    if isinstance(value, dict):
        held = value.items()
        return {key: _without_nulls(inner) for key, inner in held if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _parser(column: Any) -> Parse | None:
    """Returns the parser of the JSON texts in one or several columns; None if they hold none."""
    if hasattr(column, "schema"):
        return _parser_of_fields(column.schema)
    return _parser_of(column.type, {})


def _parser_of(kind: Any, metadata: Mapping[bytes, bytes]) -> Parse | None:
    """Returns the parser of values of this Arrow type, whose field has this metadata.

    A column that has no type of its own is written as JSON texts by `datasets` 5, which reads it as
    the values in them.
    """
    name = getattr(kind, "extension_name", metadata.get(EXTENSION, b"").decode())
    if name == JSON_TEXT:
        return lambda text: None if text is None else json.loads(text)
    if hasattr(kind, "value_field"):  # a list
        inner = _parser_of(kind.value_type, kind.value_field.metadata or {})
        return inner and (lambda values: values and [inner(value) for value in values])
    if hasattr(kind, "get_field_index"):  # a struct
        return _parser_of_fields([kind.field(number) for number in range(kind.num_fields)])
    return None


def _parser_of_fields(fields: Iterable[Any]) -> Parse | None:
    parser_of = {field.name: _parser_of(field.type, field.metadata or {}) for field in fields}
    parsers = {name: parse for name, parse in parser_of.items() if parse is not None}
    if not parsers:
        return None

    def parse(row: Mapping[str, Any] | None) -> Any:
        return row and {
            name: parsers[name](value) if name in parsers else value for name, value in row.items()
        }

    return parse


def _columns(path: str, field: str | ChatFields, schema: Any, arrow: Any) -> list[str]:
    """Returns the columns to read. Raises DataError if a table lacks them, or has one twice."""
    names = schema.names
    chosen = field.chosen(names) if isinstance(field, ChatFields) else [field]
    if chosen is None or not set(chosen).issubset(names):
        is_meant = _is_text if isinstance(field, str) else _is_conversation
        meant = [column.name for column in schema if is_meant(column.type, arrow)]
        raise no_field(path, field, names, meant)
    for name in chosen:
        if names.count(name) > 1:
            raise DataError(f"{path} has {names.count(name)} columns {name!r}")
    return chosen


def _is_text(kind: Any, arrow: Any) -> bool:
    held = kind.value_type if arrow.types.is_dictionary(kind) else kind
    tests = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view)
    return any(test(held) for test in tests)


def _is_conversation(kind: Any, arrow: Any) -> bool:
    del arrow
    is_plain = "struct<" in str(kind) and ("role:" in str(kind) or "from:" in str(kind))
    return is_plain or JSON_TEXT in str(kind)


def no_field(
    where: str, field: str | ChatFields, columns: Iterable[str], meant: Sequence[str]
) -> DataError:
    """Returns the error for a missing field; `meant` are the columns probably meant, likeliest
    first.
    """
    columns = list(columns)
    name = field if isinstance(field, str) else field.forms[0][0]
    fix = f"--field {shlex.quote(meant[0])}" if meant else ""
    if isinstance(field, ChatFields):
        others = replace(field, named=None, pairs=not field.pairs)
        if others.form_in(columns):
            fix = "no --pairs" if field.pairs else "--pairs"
        elif field.pairs:  # which no --field can name
            fix = ""
    return DataError(f"{where} has no field {name!r}", found=", ".join(columns) or "none", fix=fix)


@contextmanager
def _reading_table(path: str, arrow: Any) -> Iterator[None]:
    """Turns the package's errors on damaged tables into a DataError."""
    try:
        yield
    except DataError:
        raise
    except (arrow.ArrowException, OSError, EOFError, *UNREADABLE) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot read {path}: {first_line}") from None
