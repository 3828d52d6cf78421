"""What a row holds as JSON in a text is read as the value, wherever conversations are read; a text
where a text can be, too, is never learned as brackets and keys without a word.
"""

import argparse
import json

import pytest

from spmdtrain.cli import main
from spmdtrain.cli.run import prompts
from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.chats.conversation import ChatFields, read_conversation, read_pair
from spmdtrain.data.texts.documents import read_chunks, texts_in, texts_to_learn, values_of

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "é": "[1]"}}}
ASK = {"role": "user", "content": "q [1]"}
CHAT = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
OTHER = [ASK, {"role": "assistant", "content": "no"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
MORE = {"tools": TOOLS, "documents": [{"text": "d"}], "chat_template_kwargs": {"x": None}}
ROWS = {
    "messages": {"messages": CHAT, **MORE},
    "ShareGPT": {"conversations": SHAREGPT, **MORE},
    "a completion": {"prompt": CHAT[:1], "completion": CHAT[1:], **MORE},
    "a pair": {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": OTHER[1:], **MORE},
    "a pair without its prompt": {"chosen": CHAT, "rejected": OTHER, **MORE},
}
# Where a text is as good as messages.
EITHER = {"prompt", "completion", "chosen", "rejected"}
FIELDS = [(name, field) for name, row in ROWS.items() for field in row]


def read(row):
    if "chosen" in row:
        return read_pair(row, "here")
    return read_conversation(row, ChatFields(), "here")


@pytest.mark.parametrize(("name", "field"), FIELDS)
@pytest.mark.parametrize("in_ascii", [True, False])
def test_a_field_in_a_text_is_the_field_itself_or_refused(name, field, in_ascii):
    text = json.dumps(ROWS[name][field], ensure_ascii=in_ascii, indent=1)
    row = ROWS[name] | {field: text}
    if field not in EITHER:
        assert read(row) == read(ROWS[name])
        return
    with pytest.raises(DataError, match=f"^here: '{field}' is a text that holds messages as JSON"):
        read(row)
    as_content = [{"role": "user" if field == "prompt" else "assistant", "content": text}]
    whole = [ASK] if field in ("chosen", "rejected") and "prompt" not in row else []
    assert text in {text for text in texts_of(read(ROWS[name] | {field: whole + as_content}))}


def texts_of(conversations):
    pair = conversations if isinstance(conversations, tuple) else (conversations,)
    return [text for conversation in pair for text in conversation.texts]


@pytest.mark.parametrize("text", ["[1] is a source", "[]", "[1, 2]", '[{"a": 1}]', '{"role": "x"}'])
def test_a_text_in_brackets_that_holds_no_messages_is_a_text(text):
    row = {"prompt": text, "completion": f"{text}."}
    both = read_conversation(row, ChatFields(), "here")
    assert both is not None
    assert [message["content"] for message in both.messages] == [text, f"{text}."]


@pytest.mark.parametrize("text", ["[{", "hello", "", "3", "{}", '["q"]', "[" * 9_000])
def test_a_text_of_anything_else_is_no_conversation(text):
    with pytest.raises(DataError, match="^here: 'messages' (is not a list of messages|has a mess)"):
        read({"messages": text})


def test_a_text_of_null_is_an_empty_row():
    assert read({"messages": "null"}) is None


def write(path, rows):
    """Writes rows as JSON lines or as a table; their fields are texts or have a type."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({name: [row[name] for row in rows] for name in rows[0]})
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        return
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


JINJA = (
    "{{ tools | tojson }}{% for message in messages %}[{{ message.role }}]"
    "{{ message.content or message.tool_calls | tojson }}</s>{% endfor %}"
)


def test_prepared_tokens_are_those_of_the_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").write_text(JINJA)
    rows = [{"messages": CHAT, "tools": TOOLS}, {"messages": OTHER, "tools": []}]
    in_texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    for name, written in (("values", rows), ("texts", in_texts)):
        write(tmp_path / f"{name}.jsonl", written)
        paths = [f"{name}.jsonl", "--out", name]
        assert main(["data", "prepare", *paths, "--chat", "--chat-template", "t.jinja"]) == 0
    for ending in ("bin", "loss"):
        of_values, of_texts = (tmp_path / f"{name}.{ending}" for name in ("values", "texts"))
        assert of_texts.read_bytes() == of_values.read_bytes()


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", ["messages", "ShareGPT"])
def test_texts_of_tables_are_read_as_the_values(name, ending, tmp_path):
    in_texts = {field: json.dumps(value) for field, value in ROWS[name].items()}
    write(tmp_path / f"a{ending}", [in_texts])
    (chunk,) = read_chunks(str(tmp_path / f"a{ending}"), ChatFields())
    assert [read(row) for row in values_of(chunk, ChatFields())] == [read(ROWS[name])]


# --- other readers --------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [CHAT, SHAREGPT])
def test_a_tokenizer_learns_the_texts_in_messages(messages, tmp_path):
    write(tmp_path / "a.jsonl", [{"messages": messages}, {"messages": json.dumps(messages)}])
    texts = list(texts_to_learn([str(tmp_path / "a.jsonl")], "messages", None))
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    assert {"q [1]", "q"} & {*texts}


@pytest.mark.parametrize("value", [3, {"a": "b"}, ["a"], True])
def test_a_tokenizer_learns_nothing_else(value, tmp_path):
    write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": value}])
    with pytest.raises(DataError, match="'text' of row 2 is neither a text nor messages; found"):
        list(texts_to_learn([str(tmp_path / "a.jsonl")], "text", None))


@pytest.mark.parametrize(
    ("value", "fix"), [(CHAT, "spmdtrain data prepare .* --chat"), (3, None), ([3], None)]
)
def test_what_is_no_text_is_not_left_out_of_texts(value, fix, tmp_path):
    """`eval` and an alphabet of characters read texts only."""
    write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": value}])
    with pytest.raises(DataError, match="'text' of row 2 is not a text; found") as refused:
        list(texts_in([str(tmp_path / "a.jsonl")], "text"))
    assert ("try" in str(refused.value)) == bool(fix)
    refused.match(fix or "")


def prompts_of(line, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    parsed = argparse.Namespace(prompt=None, chat=None, prompts=str(tmp_path / "p.jsonl"))
    return prompts.read_prompts(parsed)


def test_a_prompt_of_messages_may_be_in_a_text(tmp_path):
    assert prompts_of({"messages": json.dumps(CHAT)}, tmp_path) == [CHAT]
    for line in ({"prompt": json.dumps(CHAT)}, json.dumps(CHAT)):
        with pytest.raises(DataError, match=r"p.jsonl:1 is a text that holds messages as JSON"):
            prompts_of(line, tmp_path)
    with pytest.raises(ConfigError, match="is not a prompt"):
        prompts_of({"messages": "hello"}, tmp_path)
