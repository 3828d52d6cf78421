import json

import pytest

from spmdtrain.cli import main
from spmdtrain.data.token_files.tokens import open_tokens
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer

pytest.importorskip("tokenizers")

TEXTS = ["the quick brown fox", "the lazy dog\n", "the quick dog"] * 4


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    arguments = [
        "a.jsonl",
        "--field",
        "body",
        "--vocab",
        "280",
        "--out",
        "bpe.json",
        "--special",
        "<|im_end|>",
    ]
    assert main(["tokenizer", "train", *arguments]) == 0
    said = capsys.readouterr()
    assert "bpe.json: 280 tokens, of which 2 special: <|endoftext|>, <|im_end|>" in said.out
    size = (tmp_path / "a.jsonl").stat().st_size
    assert said.err.splitlines() == [f"100% of {size} bytes", "all is read; merging pairs"]
    return tmp_path


def test_a_tokenizer_of_own_documents_prepares_them(trained, capsys):
    assert (
        main(
            [
                "data",
                "prepare",
                "a.jsonl",
                "--field",
                "body",
                "--tokenizer",
                "bpe.json",
                "--out",
                "a",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    source = open_tokens("a")
    tokenizer = open_tokenizer("bpe.json")
    assert tokenizer.size == source.vocab == 280
    assert (
        source.end_of_text == tokenizer.id_of("<|endoftext|>") == 0
        and tokenizer.id_of("<|im_end|>") == 1
    )
    assert tokenizer.decode(source.tokens) == "".join(text + "<|endoftext|>" for text in TEXTS)
    # It learned what occurs.
    assert len(tokenizer.encode(" quick")) < 4 < len(tokenizer.encode(" kciuq"))
    text = "Ünseen \x00 wörds\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text  # and has tokens for what does not
    assert "in 12 documents, vocabulary 280, tokenizer bpe.json" in said
    assert (trained / "bpe.json").read_text() == retrained(trained)


def retrained(folder) -> str:
    assert (
        main(
            [
                "tokenizer",
                "train",
                "a.jsonl",
                "--field",
                "body",
                "--vocab",
                "280",
                "--out",
                "again.json",
            ]
            + ["--special", "<|im_end|>"]
        )
        == 0
    )
    return (folder / "again.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--vocab", "256", "--out", "new.json"],
            "vocabulary of 256 has no room for 256 bytes and <|endoftext|>; try --vocab 257",
        ),
        (["--vocab", "300", "--out", "bpe.json"], "bpe.json exists already"),
        (
            ["--vocab", "300", "--out", "new.json"],
            "a.jsonl:1 has no field 'text'; found body; try --field body",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments, said, trained, capsys):
    assert main(["tokenizer", "train", "a.jsonl", *arguments]) == 5
    assert said in capsys.readouterr().err
    assert not (trained / "new.json").exists()
