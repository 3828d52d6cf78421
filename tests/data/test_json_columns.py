"""Columns of JSON texts, as `datasets` 5 writes values without one type, are read as values."""

import json

import pytest

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.conversation import ChatFields
from spmdtrain.data.texts.documents import read_chunks, values_of
from spmdtrain.data.texts.parquet_columns import arrow_rows, parquet_rows

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
if not hasattr(arrow, "json_"):
    pytest.skip("this pyarrow has no type of JSON texts", allow_module_level=True)

CALL = {"function": {"name": "f", "arguments": {"x": 1, "text": "é", "none": None}}}
MESSAGES = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
    [],
    None,
    [{"role": "user", "content": None}],
]
JSON = arrow.json_()


def text(value):
    return None if value is None else json.dumps(value)


def in_texts(of_one, kind):
    """The messages with JSON texts in them as `of_one` makes them, in this type."""
    values = [None if messages is None else of_one(messages) for messages in MESSAGES]
    return arrow.array(values, storage_of(kind)).cast(kind)


def storage_of(kind):
    """The type with texts in place of the type of JSON texts."""
    if kind == JSON:
        return arrow.string()
    if arrow.types.is_list(kind):
        return arrow.list_(storage_of(kind.value_type))
    if arrow.types.is_struct(kind):
        return arrow.struct([(field.name, storage_of(field.type)) for field in kind])
    return kind


MESSAGE = arrow.struct([("role", arrow.string()), ("rest", JSON)])
COLUMNS = {
    "a conversation": (text, JSON, lambda messages: messages),
    "messages": (lambda messages: [text(each) for each in messages], arrow.list_(JSON), None),
    "parts of messages": (
        lambda messages: [{"role": each["role"], "rest": text(each)} for each in messages],
        arrow.list_(MESSAGE),
        lambda messages: [{"role": each["role"], "rest": each} for each in messages],
    ),
}


def write(path, table):
    """Writes a table; returns what reads it."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return parquet_rows
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return arrow_rows


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_read_is_what_was_written(column, ending, tmp_path):
    of_one, kind, wanted = COLUMNS[column]
    path = tmp_path / f"a{ending}"
    rows = write(path, arrow.table({"messages": in_texts(of_one, kind)}))
    whole = [None if each is None else (wanted or list)(each) for each in MESSAGES]
    for field in (ChatFields(), "messages"):
        values = [row for _, rows_, _ in rows(str(path), field, 0, 2**20) for row in rows_]
        read = [row.get("messages") if isinstance(field, ChatFields) else row for row in values]
        assert read == whole


def test_rows_of_chunks_keep_the_nulls_of_a_writer_alone(tmp_path):
    """A table adds keys with null to objects that lack them; JSON texts hold what was written."""
    of_one, kind, _ = COLUMNS["messages"]
    tools = [[{"name": "f", "unit": None}], [{"name": "g", "unit": "m"}], None, []]
    write(
        tmp_path / "a.parquet",
        arrow.table({"messages": in_texts(of_one, kind), "tools": tools}),
    )
    (chunk,) = read_chunks(str(tmp_path / "a.parquet"), ChatFields())
    first, last = values_of(chunk, ChatFields())[::3]
    assert first == {"messages": MESSAGES[0], "tools": [{"name": "f"}]}
    assert last == {"messages": MESSAGES[3], "tools": []}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "Expecting property name"),
        ("[" * 99_999, "maximum recursion depth"),
        ("9" * 5_000, ""),
    ],
)
def test_a_text_that_is_no_json_is_refused_in_a_line(value, said, tmp_path):
    table = arrow.table({"messages": arrow.array([value]).cast(JSON)})
    rows = write(tmp_path / "a.parquet", table)
    with pytest.raises(DataError, match=f"cannot read .*a.parquet: {said}"):
        list(rows(str(tmp_path / "a.parquet"), "messages", 0, 2**20))
