import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from spmdtrain.config.errors import DataError, StorageError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.corpus import open_corpus, token_corpus
from spmdtrain.data.tokenizer import open_tokenizer
from spmdtrain.data.tokens import open_tokens, storage_dtype, write_tokens

DOCUMENTS = ["to be", "", "or not to be", "that is the question"]


@pytest.fixture
def written(tmp_path):
    write_tokens(tmp_path / "play.v1", DOCUMENTS, open_tokenizer("bytes"))
    return tmp_path / "play.v1.bin"


def edit(sidecar, **changes):
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | changes))


@pytest.mark.parametrize("kind", ["bytes", "characters", "huggingface"])
def test_a_token_file_gives_back_its_documents(kind, tmp_path, tokenizer_json):
    tokenizer = open_tokenizer(str(tokenizer_json) if kind == "huggingface" else kind, DOCUMENTS)
    calls = []
    summary = write_tokens(tmp_path / "new" / "play", iter(DOCUMENTS), tokenizer, lambda *counts: calls.append(counts))
    full = [text for text in DOCUMENTS if text]
    first, second, third = np.cumsum([len(tokenizer.encode(text)) for text in full]).tolist()
    assert (summary.documents, summary.tokens) == (3, third)
    assert calls == [(1, first), (1, first), (2, second), (3, third)]  # an empty document has no tokens and no start
    corpus = token_corpus([str(tmp_path / "new" / "play")])
    starts = [*corpus.document_starts.tolist(), len(corpus.tokens)]
    assert [corpus.tokenizer.decode(corpus.read(a, b)) for a, b in zip(starts[:-1], starts[1:], strict=True)] == full
    sidecar = json.loads((tmp_path / "new" / "play.json").read_text())
    assert sidecar["sha256"] == hashlib.sha256((tmp_path / "new" / "play.bin").read_bytes()).hexdigest()
    assert (sidecar["dtype"], sidecar["vocab"]) == ("uint16", tokenizer.size)


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary():
    assert [storage_dtype(vocab) for vocab in (2, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_ids_beyond_65535_survive(tmp_path):
    class Wide:
        size = 100_000

        def encode(self, text):
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


@pytest.mark.parametrize("name", ["file/play", "/proc/play", "play" * 64], ids=["in a file", "no disk", "too long"])
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
        (lambda path: path.with_suffix(".idx").write_bytes(bytes(16)), r"play\.v1\.idx is truncated"),
        (lambda path: path.with_suffix(".json").write_text("{"), r"play\.v1\.json is not JSON"),
        (lambda path: path.with_suffix(".json").write_bytes(b"\xff"), r"play\.v1\.json is not JSON"),
        (lambda path: path.with_suffix(".json").write_text("[]"), r"play\.v1\.json is not the sidecar"),
        (lambda path: edit(path.with_suffix(".json"), version=2), r"play\.v1\.json has version 2"),
        (lambda path: edit(path.with_suffix(".json"), dtype="int8"), r"play\.v1\.json: dtype='int8'"),
        (lambda path: edit(path.with_suffix(".json"), dtype="uint32"), r"play\.v1\.bin is truncated"),
        (lambda path: edit(path.with_suffix(".json"), tokens=True), r"play\.v1\.json is damaged: tokens=True"),
        (lambda path: edit(path.with_suffix(".json"), tokens=0), r"play\.v1\.json is damaged"),
        (lambda path: edit(path.with_suffix(".json"), tokenizer="bytes"), r"play\.v1\.json is damaged: tokenizer"),
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


def test_an_id_beyond_the_vocabulary_is_refused_with_file_and_offset_when_it_is_read(written, tmp_path):
    write_tokens(tmp_path / "good", DOCUMENTS, open_tokenizer("bytes"))
    tokens = np.frombuffer(written.read_bytes(), "<u2").copy()
    tokens[20] = 256
    written.write_bytes(tokens.tobytes())
    corpus = token_corpus([str(tmp_path / "good.bin"), str(written)])
    assert len(corpus.read(0, 37 + 20)) == 57
    for start in (0, 37, 50, 57):
        with pytest.raises(
            DataError, match=r"play\.v1\.bin: id 256 at token offset 20 is beyond its vocabulary of 256"
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
    seen["a then other"] = token_corpus([str(tmp_path / "a.bin"), str(tmp_path / "other.bin")]).fingerprint
    seen["other then a"] = token_corpus([str(tmp_path / "other.bin"), str(tmp_path / "a.bin")]).fingerprint
    assert len(set(seen.values())) == len(seen)


def test_files_of_different_tokenizers_and_a_contradicted_tokenizer_setting_are_refused(tmp_path):
    for kind in ("bytes", "characters"):
        write_tokens(tmp_path / kind, DOCUMENTS, open_tokenizer(kind, DOCUMENTS))
    paths = str(tmp_path / "bytes.bin"), str(tmp_path / "characters.bin")
    with pytest.raises(DataError, match="different tokenizers"):
        token_corpus(paths)
    with pytest.raises(
        DataError, match=r"made with another tokenizer; asked data.tokenizer='characters'; found 'bytes'"
    ):
        open_corpus(DataConfig(corpus="tokens", path=paths[0], tokenizer="characters"), None, 0)
    assert open_corpus(DataConfig(corpus="tokens", path=paths[1], tokenizer="characters"), None, 0).vocab < 30
