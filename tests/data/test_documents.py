"""The same documents, in every kind of file that holds them, become the same tokens."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spmdtrain.cli import main
from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import EvalWindows, Range, TrainStream
from spmdtrain.data.corpus import token_corpus
from spmdtrain.data.prepare import encode, token_shards
from spmdtrain.data.prepare.prepare_corpus import Job, prepare
from spmdtrain.data.texts.documents import (
    FORMATS,
    READERS,
    find_inputs,
    read_chunks,
    texts_in,
    values_of,
)
from spmdtrain.data.token_files.tokens import COUNTS, _read_shared, open_tokens
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

DOCUMENTS = ["to be", "", "or not\nto be", "dass ist die Fräge", "x" * 50]
END = 255  # of bytes


def write_lines(path: Path, opener=open) -> None:
    with opener(path, "wb") as file:
        for number, text in enumerate(DOCUMENTS):
            file.write(json.dumps({"id": number, "text": text}).encode() + b"\n")
        file.write(b"\n")  # a line without anything is no document


def write_text(path: Path) -> None:
    path.write_text("<|end|>".join(DOCUMENTS) + "<|end|>\n")


def write_zst(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    write_lines(path, zstandard.open)


def table():
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})


def write_parquet(path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table(), path, row_group_size=2)


def write_dataset(path: Path) -> None:
    """What `datasets.Dataset.save_to_disk` writes: streams of record batches, and a list of
    them.
    """
    arrow = pytest.importorskip("pyarrow")
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table().slice(0, 2), table().slice(2)), strict=True):
        with (
            arrow.OSFile(str(path / name), "wb") as sink,
            arrow.ipc.new_stream(sink, part.schema) as stream,
        ):
            stream.write_table(part, max_chunksize=2)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    (path / "dataset_info.json").write_text("{}")


WRITERS = {
    "a.jsonl": write_lines,
    "a.json.gz": lambda path: write_lines(path, gzip.open),
    "a.jsonl.zst": write_zst,
    "a.txt": write_text,
    "a.parquet": lambda path: (table(), write_parquet(path)),
    "dataset": write_dataset,
}


def written(out: Path) -> list[list[int]]:
    """The ids of each document of a token file."""
    source = open_tokens(out)
    return [part.tolist() for part in np.split(source.tokens, source.document_starts[1:])]


WANTED = [[*text.encode(), END] for text in DOCUMENTS if text]


def test_every_format_has_a_row_that_reads_it():
    assert set(READERS) == {"text", *FORMATS.values()}


@pytest.mark.parametrize("name", WRITERS)
def test_documents_of_every_format_end_with_the_end_of_text(name, tmp_path, capsys):
    WRITERS[name](tmp_path / name)
    prepare(
        Job(
            [str(tmp_path / name)],
            str(tmp_path / "out"),
            split_on="<|end|>" if name == "a.txt" else None,
        )
    )
    assert written(tmp_path / "out") == WANTED
    sidecar = json.loads((tmp_path / "out.json").read_text())
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert (sidecar["end_of_text"], sidecar["text_bytes"], sidecar["documents"]) == (END, size, 4)
    said = capsys.readouterr().out
    assert f"{size + 4:,} tokens (uint16) in 4 documents" in said
    assert "token 255 ends each document" in said and "'to be�'" in said


@pytest.mark.parametrize("name", WRITERS)
def test_a_reader_goes_on_behind_any_row(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "spmdtrain.data.texts.documents.CHUNK_BYTES", 20
    )  # several chunks to a file
    WRITERS[name](tmp_path / name)
    files = find_inputs([str(tmp_path / name)])
    split_on = "<|end|>" if name == "a.txt" else None
    for file in files:

        def rows(skip, file=file):
            chunks = list(read_chunks(file, "text", split_on, skip))
            values = [value or "" for chunk in chunks for value in values_of(chunk, "text")]
            firsts = [chunk.first for chunk in chunks]
            assert firsts == sorted(firsts) and (not firsts or firsts[0] == skip)
            return values

        whole = rows(0)
        assert [rows(skip) for skip in range(len(whole))] == [
            whole[skip:] for skip in range(len(whole))
        ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no JSON", r"a\.jsonl:2 is not a line of JSON"),
        ("[1]", r"a\.jsonl:2 is not a JSON object"),
        (
            '{"id": 1, "t": "x", "body": "xy"}',
            r"a\.jsonl:2 has no field 'text'; found id, t, body; try --field body",
        ),
        ('{"text": 3}', r"a\.jsonl: 'text' of row 2 is not a text; found 3"),
        (
            '{"text": "\\ud800"}',
            r"'text' of row 2 is not a text: half a surrogate pair at position 0",
        ),
    ],
)
def test_a_wrong_line_is_named(line, said, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line + "\n")
    with pytest.raises(DataError, match=said):
        prepare(Job([str(tmp_path / "a.jsonl")], str(tmp_path / "out")))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.zst", "a.parquet", "a.arrow"])
def test_a_damaged_file_is_named(name, tmp_path):
    pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    (tmp_path / name).write_bytes(b"not what the name says")
    with pytest.raises(DataError, match=rf"cannot read .*{name}: "):
        prepare(Job([str(tmp_path / name)], str(tmp_path / "out")))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("held", "said"), [("chats", "; try --field 'a chat'"), ("texts", "")])
def test_a_field_of_conversations_is_answered_by_conversations(ending, held, said, tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"id": "a text", "list": ["x"]} | ({"a chat": messages} if held == "chats" else {})
    path = tmp_path / f"a{ending}"
    if ending == ".jsonl":
        path.write_text(json.dumps(row))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist([row]), path)
    with pytest.raises(DataError) as error:
        prepare(Job([str(path)], str(tmp_path / "out"), chat=True))
    assert str(error.value).endswith(f"found {', '.join(row)}{said}")


def test_a_column_and_a_split_that_are_not_there_are_answered_by_those_that_are(tmp_path):
    write_parquet(tmp_path / "a.parquet") if table() else None
    with pytest.raises(
        DataError, match=r"a\.parquet has no field 'body'; found id, text; try --field text"
    ):
        prepare(Job([str(tmp_path / "a.parquet")], str(tmp_path / "out"), field="body"))
    for split in ("train", "test"):
        (tmp_path / "all").mkdir(exist_ok=True)
        write_dataset(tmp_path / "all" / split)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match="several splits of a dataset; found test, train; try .*/all/test"
    ):
        find_inputs([str(tmp_path / "all")])


# --- the end of a text --------------------------------------------------------------------------


def test_the_end_of_text_is_the_tokenizers_own_or_the_one_asked_for(tmp_path, tokenizer_json):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n')

    def prepared(number: int, **options) -> tuple[int | None, int]:
        """(the id that ends a text, the last id that was written)"""
        out = tmp_path / f"out{number}"
        prepare(Job([str(tmp_path / "a.jsonl")], str(out), **options))
        source = open_tokens(out)
        return source.end_of_text, int(source.tokens[-1])

    end = 0  # of "<|end|>", which the tokenizer was trained with
    assert prepared(0, tokenizer=str(tokenizer_json)) == (end, end)
    hello = prepared(1, tokenizer=str(tokenizer_json), end_of_text="none")
    assert hello[0] is None and hello[1] != end
    a = prepared(2, tokenizer=str(tokenizer_json), end_of_text="a")
    assert a[0] == a[1] != end
    tokenizer = json.loads(tokenizer_json.read_text())
    tokenizer["added_tokens"].append(
        tokenizer["added_tokens"][0] | {"id": 999, "content": "<stop>"}
    )
    tokenizer_json.write_text(json.dumps(tokenizer))
    # As old and new versions write it.
    for number, eos in enumerate(('"<stop>"', '{"content": "<stop>"}'), 30):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {eos}}}')
        stop, last = prepared(number, tokenizer=str(tokenizer_json))
        assert stop == last != end
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ["<stop>"]}')  # which names none
    assert prepared(32, tokenizer=str(tokenizer_json)) == (end, end)
    assert prepared(4, end_of_text="\n") == (10, 10)
    assert prepared(5, tokenizer="characters") == (4, 4)  # behind the ids of e, h, l and o
    with pytest.raises(DataError, match="has no token '<end>' to end a text with"):
        prepared(6, end_of_text="<end>")


def test_the_begin_of_text_is_before_each_document_and_learned_in_none(
    tmp_path, tokenizer_json, put_before_texts, capsys
):
    put_before_texts("he")
    begin = open_tokenizer(str(tokenizer_json)).id_of("he")
    (tmp_path / "a.jsonl").write_text('{"text": "to be"}\n{"text": ""}\n{"text": "or not"}\n')
    job = Job([str(tmp_path / "a.jsonl")], str(tmp_path / "a"), tokenizer=str(tokenizer_json))
    prepare(job)
    assert f"token {begin} begins each document; token 0 ends each" in capsys.readouterr().out
    source = open_tokens(tmp_path / "a")
    assert source.begin_of_text == begin and len(source.document_starts) == 2
    prepare(replace(job, out=str(tmp_path / "bare"), begin_of_text="none"))
    bare = written(tmp_path / "bare")
    assert written(tmp_path / "a") == [[begin, *ids] for ids in bare]
    assert open_tokens(tmp_path / "bare").begin_of_text is None
    said = [{"role": role, "content": role} for role in ("user", "assistant")]
    pair = {"prompt": said[:1], "chosen": said[1:], "rejected": [said[1] | {"content": "no"}]}
    for options, row in (({}, {"messages": said}), ({"pairs": True}, pair)):
        (tmp_path / "c.jsonl").write_text(json.dumps(row))
        chat = replace(job, paths=[str(tmp_path / "c.jsonl")], chat=True, **options)
        out = tmp_path / f"chat{len(options)}"
        prepare(replace(chat, out=str(out)))
        source = open_tokens(out)
        begins = np.flatnonzero(source.tokens[:] == begin)
        assert len(begins) == 1 + len(options) and begins[0] == 0
        assert not (source.loss_row[:][begins] & COUNTS).any()


def test_a_tokenizer_without_a_known_end_of_text_asks_for_one(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"hello": 0, "?": 1}, "?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("hello")
    job = Job([str(tmp_path / "a.txt")], str(tmp_path / "out"), tokenizer=str(tmp_path / "t.json"))
    with pytest.raises(
        DataError, match="no token of .* is known to end a text; .*--end-of-text none"
    ):
        prepare(job)


# --- shards, processes, kills -------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    """Two files of 600 documents of many lengths, some empty."""
    folder = tmp_path_factory.mktemp("lines")
    for name in ("one", "two"):
        texts = [f"{name} {number} " * (number * 7919 % 13) for number in range(300)]
        rows = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("out-*"))}


def sharded(lines: Path, folder: Path, **options) -> Job:
    return Job([str(lines / "*.jsonl")], str(folder / "out"), shard_tokens=3000, **options)


@pytest.fixture(scope="module")
def uninterrupted(lines, tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    prepare(sharded(lines, folder))
    return shard_bytes(folder)


def test_processes_and_shards_change_nothing(lines, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr("spmdtrain.data.texts.documents.CHUNK_BYTES", 2000)
    prepare(sharded(lines, tmp_path, workers=2))
    assert shard_bytes(tmp_path) == uninterrupted and len(uninterrupted) == 3 * 10
    prepare(Job([str(lines / "*.jsonl")], str(tmp_path / "whole")))
    parts = [content for name, content in uninterrupted.items() if name.endswith(".bin")]
    assert (tmp_path / "whole.bin").read_bytes() == b"".join(parts)
    sizes = [len(part) // 2 for part in parts]
    assert min(sizes[:-1]) >= 3000 and max(sizes) < 3000 + 13 * 8 + 1


def test_shards_share_the_content_of_their_tokenizer(lines, tmp_path, tokenizer_json):
    """The corpus is that of a single file: its ids, its tokenizer and what the tokenizer is known
    by.
    """
    options = {"tokenizer": str(tokenizer_json)}
    prepare(sharded(lines, tmp_path, **options))
    sidecars = list(tmp_path.glob("out-*.json"))
    assert len(sidecars) > 3 and max(path.stat().st_size for path in sidecars) < 1000
    prepare(Job([str(lines / "*.jsonl")], str(tmp_path / "whole"), **options))
    parts, whole = (
        token_corpus([str(tmp_path / "out-*.bin")]),
        token_corpus([str(tmp_path / "whole.bin")]),
    )
    assert parts.tokenizer.spec() == whole.tokenizer.spec() and parts.has_tokenizer_of(whole)
    assert np.array_equal(parts.read(0, 10**6), whole.read(0, 10**6))
    shared = tmp_path / "out.tokenizer.json"
    shared.write_text(shared.read_text() + " ")
    _read_shared.cache_clear()
    with pytest.raises(DataError, match="does not have its recorded sha256"):
        token_corpus([str(tmp_path / "out-00000.bin")])
    shared.unlink()
    _read_shared.cache_clear()
    with pytest.raises(
        DataError, match=r"out\.tokenizer\.json cannot be read, the tokenizer of .*out-00000\.json"
    ):
        open_tokens(tmp_path / "out-00000.bin")


def test_an_interrupted_prepare_goes_on_behind_its_last_shard(
    lines, uninterrupted, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("spmdtrain.data.texts.documents.CHUNK_BYTES", 2000)
    finish = token_shards.Output._end_shard

    def killed_at(number):
        def end_shard(self, position):
            finish(self, position)
            if len(self.summaries) == number:
                raise KeyboardInterrupt

        return end_shard

    for number in (1, 2, 7):
        monkeypatch.setattr(token_shards.Output, "_end_shard", killed_at(number))
        with pytest.raises(KeyboardInterrupt):
            prepare(sharded(lines, tmp_path))
        assert len(shard_bytes(tmp_path)) == 3 * number
    monkeypatch.setattr(token_shards.Output, "_end_shard", finish)
    capsys.readouterr()
    prepare(sharded(lines, tmp_path, workers=2))
    said = capsys.readouterr()
    assert "continuing after" in said.err and "out-00006.bin" in said.err
    assert shard_bytes(tmp_path) == uninterrupted
    prepare(sharded(lines, tmp_path))
    again = capsys.readouterr()
    assert "is finished already" in again.err and again.out == said.out
    with pytest.raises(
        DataError, match="was started with different shard_tokens; try another --out"
    ):
        prepare(Job([str(lines / "*.jsonl")], str(tmp_path / "out"), shard_tokens=4000))
    with pytest.raises(DataError, match="was started with different files"):
        prepare(Job([str(lines / "one.jsonl")], str(tmp_path / "out"), shard_tokens=3000))
    (tmp_path / "out-00003.bin").unlink()
    with pytest.raises(DataError, match=r"no token file .*out-00003\.bin"):
        prepare(sharded(lines, tmp_path))


@pytest.mark.seconds
def test_a_kill_in_the_middle_of_a_shard_costs_that_shard_alone(lines, uninterrupted, tmp_path):
    """Killed for good, with two workers, which must not outlive it."""
    code = (
        "import sys, time, spmdtrain.data.prepare.token_shards as s\n"
        "from spmdtrain.data.prepare.prepare_corpus import *\n"
        "if __name__ == '__main__':\n"
        "    write = s.Output.write\n"
        "    def slow(self, *a): write(self, *a); "
        "print(len(self.summaries), flush=True); time.sleep(0.3)\n"
        "    s.Output.write = slow\n"
        "    import spmdtrain.data.texts.documents as d; d.CHUNK_BYTES = 4000\n"
        "    prepare(Job([sys.argv[1]], sys.argv[2], shard_tokens=3000, workers=2))\n"
    )
    script = tmp_path / "killed.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(lines / "*.jsonl"), str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while int(process.stdout.readline()) < 3:
            pass
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
    done = len(list(tmp_path.glob("out-*.json")))
    assert 3 <= done < 10 and list(tmp_path.glob(".out-*.partial"))
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives the prepare that started it"
        time.sleep(0.05)
    prepare(sharded(lines, tmp_path))
    assert shard_bytes(tmp_path) == uninterrupted
    assert not list(tmp_path.glob(".*"))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_a_process_that_dies_is_told_of(monkeypatch):
    monkeypatch.setattr(encode, "_encode", os._exit)
    with pytest.raises(DataError, match="a tokenizing process has died.*fewer --workers"):
        list(encode.encode_all(RECIPE, [3], workers=2))


def test_what_is_wrong_in_a_process_is_told_as_in_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2 has no field 'text'"):
        prepare(Job([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), workers=2))


RECIPE = encode.Recipe({"kind": "bytes"}, None, "text")


# --- conversations ------------------------------------------------------------------------------


CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def test_conversations_have_their_loss_on_the_answers(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    arguments = ["--chat", "--template", r"<{role}>{content}\n", "--out", str(tmp_path / "out")]
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), *arguments]) == 0
    source = open_tokens(tmp_path / "out")
    text = b"<user>2+2?\n<assistant>4\n<user>bye\n<assistant>ciao\n\xff"
    assert source.tokens.astype(np.uint8).tobytes() == text
    learned = bytes(
        token for token, counts in zip(source.tokens.tolist(), source.loss, strict=True) if counts
    )
    assert learned == b"4\nciao\n\xff"


@pytest.mark.parametrize("most_open", [0, 100])
def test_batches_of_conversations_count_the_answers_as_targets(most_open, tmp_path, monkeypatch):
    """Beside a text, all of which counts."""
    monkeypatch.setattr("spmdtrain.data.token_files.rows.MOST_OPEN", most_open)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "text.txt").write_text("text")
    prepare(
        Job(
            [str(tmp_path / "chat.jsonl")],
            str(tmp_path / "chat"),
            chat=True,
            template="<{role}>{content}.",
        )
    )
    prepare(Job([str(tmp_path / "text.txt")], str(tmp_path / "text")))
    corpus = token_corpus([str(tmp_path / "chat.bin"), str(tmp_path / "text.bin")])
    assert corpus.end_of_text == END
    span = Range(0, len(corpus.tokens))
    for windows in (
        TrainStream(corpus, span, 9, seed=0, shuffle=False),
        EvalWindows(corpus, span, 9),
    ):
        batch = windows.samples(np.arange(7))
        learned = batch["targets"][batch["mask"] == 1].astype(np.uint8).tobytes()
        assert learned.startswith(b"4.ciao.\xfftex") and set(batch["mask"].ravel()) == {0, 1}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "is not a list of messages"),
        ("hello", "is not a list of messages; found 'hello'"),
        ([{"role": "user"}], "has a message without role and content"),
        ([{"role": "user", "content": None}], "has a message without role and content"),
    ],
)
def test_what_is_no_conversation_is_named(messages, said, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: 'messages' {said}"):
        prepare(Job([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), chat=True))


def test_a_disk_that_is_full_is_named(lines, tmp_path, capsys):
    (tmp_path / f".out.bin.{os.getpid()}.partial").symlink_to("/dev/full")
    assert main(["data", "prepare", str(lines / "one.jsonl"), "--out", str(tmp_path / "out")]) == 10
    assert f"cannot write {tmp_path}/out.bin: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.csv", "A.TSV", "a.csv.gz"])
def test_a_table_in_text_is_not_one_document(tmp_path, name):
    (tmp_path / name).write_bytes(b"text,n\nto be,1\n")
    with pytest.raises(DataError, match=r"is a table: .*; try the same table as \.jsonl"):
        list(texts_in([str(tmp_path / name)], "text"))
