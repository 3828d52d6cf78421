import io
import sys
import threading

import pytest

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.corpus import open_corpus
from spmdtrain.data.prepare.prepare_corpus import Job, prepare
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer


def job(*paths, out, **options):
    return Job([str(path) for path in paths], str(out), **options)


@pytest.fixture
def texts(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"text number {number}\n")
    return tmp_path


def test_prepared_text_trains_like_the_text_itself(texts, capsys):
    prepare(job(texts / "*.txt", out=texts / "all", tokenizer="characters", end_of_text="none"))
    from_text = open_corpus(
        DataConfig(corpus="text", path=str(texts / "*.txt"), tokenizer="characters"), None, 0
    )
    from_file = open_corpus(DataConfig(corpus="tokens", path=str(texts / "all.bin")), None, 0)
    assert from_file.read(0, 10**6).tolist() == from_text.read(0, 10**6).tolist()
    assert from_file.document_starts.tolist() == from_text.document_starts.tolist()
    assert from_file.tokenizer.spec() == from_text.tokenizer.spec()
    out, err = capsys.readouterr()
    assert (
        "all.bin: 440 tokens (uint16) in 30 documents, vocabulary 20, tokenizer characters" in out
    )
    assert "100% of 440 bytes, 440 tokens" in err and 5 < len(err.splitlines()) <= 11


def test_one_file_is_one_document(texts, capsys):
    prepare(job(texts / "00.txt", out=texts / "one"))
    assert "15 tokens (uint16) in 1 document, " in capsys.readouterr().out


def test_on_a_terminal_there_is_a_bar(texts, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    prepare(job(texts / "*.txt", out=texts / "all"))
    assert "470 tokens" in terminal.getvalue() and "440/440 bytes" in terminal.getvalue()


def test_a_wrong_file_leaves_no_token_file(texts):
    (texts / "zz.txt").write_bytes(b"ok\xff")
    with pytest.raises(DataError, match=r"zz\.txt is not UTF-8 text: byte 0xff at offset 2"):
        prepare(job(texts / "*.txt", out=texts / "all"))
    assert not [path for path in texts.iterdir() if path.suffix != ".txt"]
    with pytest.raises(DataError, match="no file matches"):
        prepare(job(texts / "*.md", out=texts / "all"))


def test_a_document_that_takes_long_leaves_lines_too(texts, monkeypatch, capsys):
    """The reader of this test waits in the middle of the work for a second line."""
    monkeypatch.setattr("spmdtrain.data.prepare.file_progress.SILENCE", 0.01)
    heard = []

    def hear(*words, **options):
        print(*words, **options)
        heard.append(words)
        two.set() if len(heard) == 2 else None

    two = threading.Event()
    monkeypatch.setattr("spmdtrain.data.prepare.file_progress.print", hear, raising=False)
    encode = ByteTokenizer.encode_batch

    def slow(self, texts, **options):
        assert two.wait(60), "nothing was said"
        return encode(self, texts, **options)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", slow)
    prepare(job(texts / "00.txt", out=texts / "one"))
    assert "0 of 14 bytes, 0 tokens, 0 s: still at work" in capsys.readouterr().err
