import contextlib
import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from spmdtrain.config.errors import DataError, StorageError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.batches import EvalWindows, Range, TrainStream
from spmdtrain.data.corpus import Corpus, open_corpus, token_corpus
from spmdtrain.data.packing import PackedWindows
from spmdtrain.data.prepare.token_writer import write_tokens
from spmdtrain.data.token_files.rows import MOST_OPEN, Concatenated
from spmdtrain.data.token_files.tokens import open_tokens, storage_dtype
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

DOCUMENTS = ["to be", "", "or not to be", "that is the question"]


@pytest.fixture
def written(tmp_path):
    write_tokens(tmp_path / "play.v1", DOCUMENTS, open_tokenizer("bytes"))
    return tmp_path / "play.v1.bin"


def edit(sidecar, **changes):
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | changes))


def leave_out(sidecar, key):
    content = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({name: value for name, value in content.items() if name != key}))


@pytest.mark.parametrize("kind", ["bytes", "characters", "huggingface"])
def test_a_token_file_gives_back_its_documents(kind, tmp_path, tokenizer_json):
    tokenizer = open_tokenizer(str(tokenizer_json) if kind == "huggingface" else kind, DOCUMENTS)
    calls = []
    summary = write_tokens(
        tmp_path / "new" / "play", iter(DOCUMENTS), tokenizer, lambda *counts: calls.append(counts)
    )
    full = [text for text in DOCUMENTS if text]
    first, second, third = np.cumsum([len(tokenizer.encode(text)) for text in full]).tolist()
    assert (summary.documents, summary.tokens) == (3, third)
    # An empty document has no tokens and no start.
    assert calls == [(1, first), (1, first), (2, second), (3, third)]
    corpus = token_corpus([str(tmp_path / "new" / "play")])
    starts = [*corpus.document_starts.tolist(), len(corpus.tokens)]
    assert [
        corpus.tokenizer.decode(corpus.read(a, b))
        for a, b in zip(starts[:-1], starts[1:], strict=True)
    ] == full
    sidecar = json.loads((tmp_path / "new" / "play.json").read_text())
    assert (
        sidecar["sha256"]
        == hashlib.sha256((tmp_path / "new" / "play.bin").read_bytes()).hexdigest()
    )
    assert (sidecar["dtype"], sidecar["vocab"]) == ("uint16", tokenizer.size)


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary():
    assert [storage_dtype(vocab) for vocab in (2, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_ids_beyond_65535_survive(tmp_path):
    class Wide:
        size = 100_000

        def encode(self, text, parse_special):  # noqa: ARG002
            return np.array([int(word) for word in text.split()], np.int32)

        def spec(self):
            return {"kind": "bytes"}

    write_tokens(tmp_path / "wide", ["99999 0", "70000"], Wide())
    assert token_corpus([str(tmp_path / "wide.bin")]).read(0, 3).tolist() == [99999, 0, 70000]


def test_an_interrupted_prepare_leaves_nothing_behind(tmp_path):
    def documents():
        yield "first"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "play", documents(), open_tokenizer("bytes"))
    assert list(tmp_path.iterdir()) == []


def test_empty_documents_alone_are_refused_and_existing_files_never_replaced(tmp_path, written):
    with pytest.raises(DataError, match="corpus is empty"):
        write_tokens(tmp_path / "none", ["", ""], open_tokenizer("bytes"))
    before = written.read_bytes()
    with pytest.raises(DataError, match="play.v1.bin exists already"):
        write_tokens(written, ["other"], open_tokenizer("bytes"))
    assert written.read_bytes() == before and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "name", ["file/play", "/proc/play", "play" * 64], ids=["in a file", "no disk", "too long"]
)
def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(StorageError, match=f"cannot write {name}.bin: "):
        write_tokens(name, DOCUMENTS, open_tokenizer("bytes"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"no token file .*play\.v1\.bin"),
        (lambda path: path.with_suffix(".json").unlink(), r"play\.v1\.bin has no sidecar"),
        (lambda path: path.with_suffix(".idx").unlink(), r"play\.v1\.idx is missing"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            r"play\.v1\.bin is truncated.*74 bytes.*found 73 bytes",
        ),
        (lambda path: path.write_bytes(path.read_bytes() + b"xx"), r"play\.v1\.bin is too long"),
        (
            lambda path: path.with_suffix(".idx").write_bytes(bytes(16)),
            r"play\.v1\.idx is truncated",
        ),
        (lambda path: path.with_suffix(".json").write_text("{"), r"play\.v1\.json is not JSON"),
        (
            lambda path: path.with_suffix(".json").write_bytes(b"\xff"),
            r"play\.v1\.json is not JSON",
        ),
        (
            lambda path: path.with_suffix(".json").write_text("[]"),
            r"play\.v1\.json is not the sidecar",
        ),
        (lambda path: edit(path.with_suffix(".json"), version=2), r"play\.v1\.json has version 2"),
        (
            lambda path: edit(path.with_suffix(".json"), dtype="int8"),
            r"play\.v1\.json: dtype='int8'",
        ),
        (
            lambda path: edit(path.with_suffix(".json"), dtype="uint32"),
            r"play\.v1\.bin is truncated",
        ),
        (
            lambda path: edit(path.with_suffix(".json"), tokens=True),
            r"play\.v1\.json is damaged: tokens=True",
        ),
        (lambda path: edit(path.with_suffix(".json"), tokens=0), r"play\.v1\.json is damaged"),
        (
            lambda path: edit(path.with_suffix(".json"), tokenizer="bytes"),
            r"play\.v1\.json is damaged: tokenizer",
        ),
        (
            lambda path: leave_out(path.with_suffix(".json"), "tokenizer"),
            r"damaged: it names no tokenizer",
        ),
    ],
)
def test_a_damaged_token_file_is_refused_by_name(damage, message, written):
    damage(written)
    with pytest.raises(DataError, match=message):
        open_tokens(written)


@pytest.mark.parametrize("starts", [[0, 20, 17], [1, 5, 17], [0, 5, 37], [0, 5, 5]])
def test_document_offsets_that_do_not_rise_are_refused_by_name(starts, written):
    written.with_suffix(".idx").write_bytes(np.array(starts, "<u8").tobytes())
    with pytest.raises(DataError, match=r"play\.v1\.idx is damaged"):
        token_corpus([str(written)])


def test_an_id_beyond_the_vocabulary_is_refused_with_file_and_offset_when_it_is_read(
    written, tmp_path
):
    write_tokens(tmp_path / "good", DOCUMENTS, open_tokenizer("bytes"))
    tokens = np.frombuffer(written.read_bytes(), "<u2").copy()
    tokens[20] = 256
    written.write_bytes(tokens.tobytes())
    corpus = token_corpus([str(tmp_path / "good.bin"), str(written)])
    assert len(corpus.read(0, 37 + 20)) == 57
    for start in (0, 37, 50, 57):
        with pytest.raises(
            DataError,
            match=r"play\.v1\.bin: id 256 at token offset 20 is beyond its vocabulary of 256",
        ):
            corpus.read(start, 60)


def test_several_files_read_as_one(tmp_path):
    for name in "ab":
        write_tokens(tmp_path / name, [name + text for text in DOCUMENTS], open_tokenizer("bytes"))
    corpus = token_corpus([str(tmp_path / "*.bin")])
    text = "".join(name + text for name in "ab" for text in DOCUMENTS)
    assert len(corpus.tokens) == len(text)
    for start in range(0, len(text), 3):
        for stop in range(start, len(text) + 1, 5):
            assert corpus.tokenizer.decode(corpus.read(start, stop)) == text[start:stop]
    assert corpus.document_starts.tolist() == [0, 6, 7, 20, 41, 47, 48, 61]


@pytest.fixture
def many(tmp_path, written):
    """More files than stay open, each of other tokens, as one glob."""
    for number in range(MOST_OPEN + 10):
        for path in written.parent.glob("play.v1.*"):
            shutil.copy(path, tmp_path / f"many{number:04}{path.suffix}")
        (tmp_path / f"many{number:04}.bin").write_bytes(bytes([number % 256, 0]) * 37)
    return str(tmp_path / "many*.bin")


@contextlib.contextmanager
def at_most_open(more):
    """This process can have no more than `more` files open beside those that it has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with nulls_open(more) as free:  # the lowest numbers that are free; others may lie between
        limit = free[-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def nulls_open(count):
    """The null device is open `count` times; gives the descriptors."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


@pytest.mark.parametrize("others", [0, 150])
def test_more_files_than_a_process_may_have_open_read_as_one(others, many):
    with nulls_open(others), at_most_open(20):
        corpus = token_corpus([many])
        want = np.repeat(np.arange(MOST_OPEN + 10), 37)
        for start in range(0, len(want), 30):
            assert corpus.read(start, start + 80).tolist() == want[start : start + 80].tolist()
    assert corpus.read(len(want), len(want) + 5).tolist() == []
    assert len(corpus.document_starts) == 3 * (MOST_OPEN + 10) and corpus.document_starts[3] == 37


CUT = lambda path: os.truncate(path, 6)  # noqa: E731


@pytest.mark.parametrize(("damage", "said"), [(os.unlink, "cannot read"), (CUT, "cut short")])
def test_one_of_many_files_that_goes_while_it_is_in_use_is_named(damage, said, many):
    corpus = token_corpus([many])
    damage(many.replace("*", "0003"))
    assert corpus.read(0, 3 * 37).tolist() == [0] * 37 + [1] * 37 + [2] * 37
    with pytest.raises(DataError, match=rf"many0003\.bin.*{said}|{said}.*many0003\.bin"):
        corpus.read(4 * 37 - 5, 4 * 37)


@pytest.mark.parametrize("kind", ["train", "eval", "packed"])
def test_the_disk_is_told_of_all_windows_of_a_batch_before_the_first_is_read(
    kind, tmp_path, monkeypatch
):
    for name in "ab":
        write_tokens(tmp_path / name, [name * 5000] * 4, open_tokenizer("bytes"))
    corpus = token_corpus([str(tmp_path / "*.bin")])
    span = Range(0, len(corpus.tokens))
    told = np.zeros(span.size, bool)
    reading = []
    will_need, read = Corpus.will_need, Corpus.read

    def note_told(self, start, stop):
        assert not reading, "a window is told of after another was read"
        told[start:stop] = True
        will_need(self, start, stop)

    def note_read(self, start, stop):
        assert told[start:stop].all()
        reading.append(start)
        return read(self, start, stop)

    monkeypatch.setattr(Corpus, "will_need", note_told)
    monkeypatch.setattr(Corpus, "read", note_read)
    windows = {
        "train": TrainStream(corpus, span, 900, seed=0, shuffle=True),
        "eval": EvalWindows(corpus, span, 900),
        "packed": PackedWindows(corpus, span, 900),
    }[kind]
    windows.samples(np.arange(43))
    assert len(reading) >= 43


def test_the_kernel_is_told_of_what_lies_in_each_file(tmp_path, monkeypatch):
    """And of nothing beyond its ends."""
    for name in "ab":
        write_tokens(tmp_path / name, [name * 5000], open_tokenizer("bytes"))
    corpus = token_corpus([str(tmp_path / "*.bin")])
    told = []
    names = {}
    fadvise, open_file = os.posix_fadvise, os.open

    def note_open(path, flags):
        file = open_file(path, flags)
        names[file] = Path(path).stem
        return file

    def note(file, begin, size, advice):
        told.append((names[file], begin, size))
        fadvise(file, begin, size, advice)

    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(os, "posix_fadvise", note)
    corpus.will_need(0, 10)
    corpus.will_need(-5, 10)
    corpus.will_need(4990, 5010)
    corpus.will_need(9990, 10_050)
    corpus.will_need(10_000, 10_010)
    corpus.will_need(20, 20)
    want = [("a", 0, 20), ("a", 0, 20), ("a", 9980, 20), ("b", 0, 20), ("b", 9980, 20)]
    assert told == want


class Watched(list):
    """Counts how often one of its elements is asked for; asking for all of them is a fault."""

    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("walked over")


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_what_a_sample_costs_does_not_grow_with_the_number_of_files(packing):
    """Counted, for windows that lie in one file, cross into the next, and hold whole files."""
    files, tokens = 4096, np.arange(10, dtype=np.uint16)
    row = Concatenated([tokens] * files)
    row.parts, row.bounds = Watched(row.parts), Watched(row.bounds)
    starts = np.arange(0, 10 * files, 10)
    corpus = Corpus(row, starts, 10, None, "")
    stream = TrainStream(corpus, Range(0, 10 * files), 25, seed=0, shuffle=True, packing=packing)
    for index in range(50):
        row.parts.asked = row.bounds.asked = 0
        window = stream.samples(np.array([index]))["tokens"][0]
        assert window.tolist() == [(window[0] + i) % 10 for i in range(25)]
        assert row.parts.asked <= 4  # 26 tokens lie in 3 or 4 files of 10
        assert row.bounds.asked <= 13 + 2 * 4 + 1  # halvings of 4097 bounds, two for each file


def test_the_fingerprint_follows_content_order_and_tokenizer_but_not_the_name(tmp_path):
    seen = {}
    for name, texts, kind in [
        ("a", DOCUMENTS, "bytes"),
        ("copy", DOCUMENTS, "bytes"),
        ("cut", ["".join(DOCUMENTS)], "bytes"),
        ("other", [*DOCUMENTS[:-1], "that is the questiom"], "bytes"),
        ("characters", ["abba"], "characters"),
        ("same ids", ["cddc"], "characters"),
    ]:
        write_tokens(tmp_path / name, texts, open_tokenizer(kind, texts))
        seen[name] = token_corpus([str(tmp_path / name)]).fingerprint
    assert seen.pop("copy") == seen["a"]
    seen["a then other"] = token_corpus(
        [str(tmp_path / "a.bin"), str(tmp_path / "other.bin")]
    ).fingerprint
    seen["other then a"] = token_corpus(
        [str(tmp_path / "other.bin"), str(tmp_path / "a.bin")]
    ).fingerprint
    assert len(set(seen.values())) == len(seen)


def test_files_of_different_tokenizers_and_a_contradicted_tokenizer_setting_are_refused(tmp_path):
    for kind in ("bytes", "characters"):
        write_tokens(tmp_path / kind, DOCUMENTS, open_tokenizer(kind, DOCUMENTS))
    paths = str(tmp_path / "bytes.bin"), str(tmp_path / "characters.bin")
    with pytest.raises(DataError, match="different tokenizers"):
        token_corpus(paths)
    with pytest.raises(
        DataError,
        match=r"made with another tokenizer; asked data.tokenizer='characters'; found 'bytes'",
    ):
        open_corpus(DataConfig(corpus="tokens", path=paths[0], tokenizer="characters"), None, 0)
    assert (
        open_corpus(
            DataConfig(corpus="tokens", path=paths[1], tokenizer="characters"), None, 0
        ).vocab
        < 30
    )
