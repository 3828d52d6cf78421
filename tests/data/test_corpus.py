import math
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.corpus import (
    STDLIB_BYTES,
    open_corpus,
    stdlib_corpus,
    synthetic_corpus,
    text_corpus,
)
from spmdtrain.data.source import KINDS, MIXTURE
from spmdtrain.data.texts.files import find_files


@pytest.fixture
def library(tmp_path):
    """A small standard library with what must be left out of it."""
    files = {
        "b.py": b"b = 1\n",
        "a/z.py": b"z = 2\n",
        "a/empty.py": b"",
        "c.py": b"c = '\xc3\xa9'\n",
        "latin.py": b"# coding: latin-1\n\xe9",
        "notes.txt": b"no",
        "_sysconfigdata_linux.py": b"no",
        "sitecustomize.py": b"no",
    } | {
        f"{folder}/x.py": b"no"
        for folder in ("test", "a/tests", "site-packages", "__pycache__", "idlelib")
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def test_every_kind_of_corpus_has_a_row_that_opens_it():
    named = get_args(DataConfig.model_fields["corpus"].annotation)
    assert set(KINDS) == {*named, MIXTURE}


def test_the_standard_library_is_read_in_path_order_one_document_per_file(library):
    corpus = stdlib_corpus("bytes", library)
    assert corpus.tokenizer.decode(corpus.tokens) == "z = 2\nb = 1\nc = 'é'\n"
    assert (
        corpus.document_starts.tolist() == [0, 6, 12] and corpus.document_starts.dtype == np.int64
    )


def test_the_standard_library_fingerprint_changes_when_a_file_or_the_tokenizer_changes(library):
    before = stdlib_corpus("bytes", library).fingerprint
    assert stdlib_corpus("bytes", library).fingerprint == before
    assert stdlib_corpus("characters", library).fingerprint != before
    (library / "test" / "x.py").write_text("changed")
    assert stdlib_corpus("bytes", library).fingerprint == before
    (library / "b.py").write_text("b = 2\n")
    assert stdlib_corpus("bytes", library).fingerprint != before
    (library / "b.py").rename(library / "b.gone")
    (library / "a" / "z.py").write_text("z = 2\nb = ")  # same text, other documents
    (library / "c.py").write_text("1\nc = 'é'\n")
    assert stdlib_corpus("bytes", library).fingerprint != before


def test_the_limit_takes_whole_files_in_an_order_that_does_not_depend_on_the_disk(library):
    sizes = {len(stdlib_corpus("bytes", library, limit).tokens) for limit in range(7, 22)}
    assert len(sizes) > 1 and all(
        len(stdlib_corpus("bytes", library, size).tokens) == size for size in sizes
    )


def test_the_real_standard_library_is_there_within_its_limit():
    corpus = open_corpus(DataConfig(), None, 0)
    assert (
        0.8 * STDLIB_BYTES < len(corpus.tokens) <= STDLIB_BYTES and len(corpus.document_starts) > 50
    )
    assert corpus.fingerprint == open_corpus(DataConfig(), None, 1).fingerprint


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(DataError, match="no Python source in"):
        stdlib_corpus("bytes", tmp_path)


def test_the_synthetic_corpus_has_the_entropy_that_it_states():
    corpus = synthetic_corpus(None, seed=3)
    documents = corpus.tokens.reshape(len(corpus.document_starts), -1)
    pairs = np.zeros((corpus.vocab, corpus.vocab))
    np.add.at(pairs, (documents[:, :-1].ravel(), documents[:, 1:].ravel()), 1)
    seen = pairs[pairs > 0] / pairs.sum()
    conditional = (pairs / pairs.sum(1, keepdims=True))[pairs > 0]
    assert -(seen * np.log(conditional)).sum() == pytest.approx(corpus.entropy, abs=3e-3)
    assert corpus.entropy == pytest.approx(1.75 * math.log(2))
    assert np.bincount(corpus.tokens).min() > 0.95 * len(corpus.tokens) / corpus.vocab


def test_the_synthetic_corpus_is_the_same_everywhere():
    """Golden: numbers recorded in tests and read-mes hang on it."""
    assert synthetic_corpus(None, 0).fingerprint[:16] == "4d91a196051b3995"
    assert synthetic_corpus(None, 0).tokens[:8].tolist() == GOLDEN_TOKENS


def test_the_synthetic_corpus_follows_the_seed_and_fits_a_small_model():
    assert synthetic_corpus(None, 0).fingerprint != synthetic_corpus(None, 1).fingerprint
    for vocab in (1, 2, 3, 10):
        corpus = open_corpus(DataConfig(corpus="synthetic"), vocab, 0)
        assert corpus.vocab == vocab and corpus.tokens.max() == vocab - 1
    assert synthetic_corpus(1, 0).entropy == 0 and synthetic_corpus(50_000, 0).vocab == 64


def test_text_files_are_documents_in_the_order_asked_and_sorted_within_a_glob(tmp_path):
    for name, text in {"b.txt": "bé\r\n", "a.txt": "a", "deep/c.txt": "c", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    corpus = text_corpus([str(tmp_path / "deep/c.txt"), str(tmp_path / "*.txt")], "characters")
    assert corpus.tokenizer.decode(corpus.tokens) == "cabé\r\n"
    assert corpus.document_starts.tolist() == [0, 1, 2]
    config = DataConfig(corpus="text", path=(str(tmp_path / "deep/c.txt"), str(tmp_path / "*.txt")))
    assert open_corpus(config, 256, 0).vocab == 256


@pytest.mark.parametrize("again", ["a.txt", "*.txt", "../*/a.txt", "link.txt"])
def test_a_file_that_is_named_twice_is_refused(again, tmp_path):
    """Its second copy would put text that is trained on into the tail that validates."""
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(
        DataError, match=r"\.txt is named twice; try naming it once; \[\[data.mix\]\]"
    ):
        find_files([str(tmp_path / "a.txt"), str(tmp_path / again)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bokks.bin", r"no file matches bokks\.bin; try books\.bin"),
        ("tokens.bin", r"no file matches tokens\.bin; found books\.bin$"),
        ("tokens.idx", r"no file matches tokens\.idx$"),
        ("none/tokens.bin", r"no file matches none/tokens\.bin; found no folder none$"),
    ],
)
def test_a_name_that_is_not_there_is_answered_by_a_near_one_or_by_what_is_there(
    name, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for there in ("books.bin", "books.txt", ".hidden.bin"):
        (tmp_path / there).write_text("x")
    with pytest.raises(DataError, match=said):
        find_files([name])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt.gz"])
def test_what_is_no_plain_text_is_not_trained_as_text(name, tmp_path):
    (tmp_path / name).write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=f"{name} is not plain text; try spmdtrain data prepare"):
        text_corpus([str(tmp_path / name)], "bytes")


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert find_files([str(tmp_path / "a[1].txt")]) == [str(tmp_path / "a[1].txt")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", r"no file matches .*missing\.txt"),
        ("*.md", r"no file matches .*\*\.md"),
        ("bad.txt", r"bad\.txt is not UTF-8 text: byte 0xff at offset 3"),
        ("empty.txt", "corpus is empty"),
        ("", "is a folder"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_text_that_cannot_be_read_is_refused_by_name(path, message, tokenizer, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match=message):
        open_corpus(
            DataConfig(corpus="text", path=str(tmp_path / path), tokenizer=tokenizer), None, 0
        )


def test_a_model_with_too_few_rows_is_refused_with_the_number_to_set(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    config = DataConfig(corpus="text", path=str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match=r"asked model\.vocab=65; .*try --set model\.vocab=256$"):
        open_corpus(config, 65, 0)


def test_the_data_room_imports_neither_jax_nor_what_is_optional():
    code = (
        "import sys, spmdtrain.data.batches, spmdtrain.data.prepare.prepare_corpus;"
        "print([name for name in ('jax', 'grain', 'tokenizers', 'rich') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


GOLDEN_TOKENS = [34, 34, 42, 33, 34, 42, 30, 63]
