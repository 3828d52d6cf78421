"""Token files that change: between two starts of a run, and while it reads them."""

import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.checkpoints.identity import check_identity, identity
from spmdtrain.config import load
from spmdtrain.config.errors import CheckpointError, DataError
from spmdtrain.data.corpus import token_corpus
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.token_writer import TokenWriter
from spmdtrain.data.source import CorpusData, open_data
from spmdtrain.data.token_files.blocks import BLOCK_BYTES, BLOCKS, COVERED, hash_of_blocks
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer
from spmdtrain.train.shard import shard

TOKENS = 5000


def write(path, tokens: int = TOKENS) -> None:
    """Writes a token file with a loss mask."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 250, tokens).astype("<u2")
    lengths = np.array([tokens // 2, tokens - tokens // 2])
    loss = rng.integers(0, 2, tokens).astype(np.uint8)
    with TokenWriter(path, open_tokenizer("bytes"), None, with_loss=True) as writer:
        writer.write(Encoded(ids, lengths, lengths, loss))
        writer.finish()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    write(folder / "a")
    return folder


def test_a_mark_of_a_loss_that_is_not_0_or_1_is_no_weight(tmp_path):
    for name in "ab":
        write(tmp_path / name)
    marks = bytearray((tmp_path / "b.loss").read_bytes())
    marks[70] = 129
    (tmp_path / "b.loss").write_bytes(marks)
    corpus = token_corpus([str(tmp_path / "*.bin")])
    assert corpus.counts(0, TOKENS + 70).max() == 1
    said = r"b\.loss is damaged: its mark at token offset 70 is not 0 or 1"
    with pytest.raises(DataError, match=said):
        corpus.counts(TOKENS, TOKENS + 71)


@given(st.sampled_from([".bin", ".loss"]), st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_rewritten_in_place_at_its_size_is_another(original, suffix, data):
    """Whichever byte it is: a small file is covered whole."""
    before = token_corpus([str(original / "a.bin")])
    path = original / f"a{suffix}"
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    try:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        after = token_corpus([str(original / "a.bin")])
    finally:
        path.write_bytes(content)
    assert after.fingerprint != before.fingerprint
    assert token_corpus([str(original / "a.bin")]).fingerprint == before.fingerprint


@pytest.mark.parametrize("start", [1, 2000, 4999])
def test_an_index_that_is_not_the_sidecars_is_refused(start, tmp_path):
    write(tmp_path / "a")
    np.array([0, start], "<i8").tofile(tmp_path / "a.idx")
    with pytest.raises(
        DataError, match=r"a\.idx is damaged: its sha256 is not the one in its sidecar"
    ):
        token_corpus([str(tmp_path / "a.bin")])


def test_a_large_file_is_covered_at_both_ends_and_no_gap_is_longer_than_a_64th(tmp_path):
    size = COVERED * 3
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)
    before = hash_of_blocks(str(path), size)
    gap = size // BLOCKS
    read = []
    for at in [0, size - 1, *np.random.default_rng(0).integers(0, size - gap, 6).tolist()]:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x" * min(gap, size - at))
        assert hash_of_blocks(str(path), size) != before, at
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes(min(gap, size - at)))
        read.append(hash_of_blocks(str(path), size))
    assert set(read) == {before}
    assert BLOCKS * BLOCK_BYTES == COVERED


CONFIG = """
[model]
name = "gpt"
layers = 1
embed = 16
heads = 2
[train]
sequence_length = 8
"""
ALONE = 'corpus = "tokens"\npath = "a.bin"\n'
MIXED = '[[data.mix]]\nname = "a"\npath = "a.bin"\n[[data.mix]]\nname = "b"\npath = "b.bin"\n'


@pytest.mark.parametrize("data", [ALONE, MIXED], ids=["alone", "mixed"])
@pytest.mark.parametrize("name", ["a.bin", "a.loss"])
def test_a_run_does_not_go_on_with_a_file_rewritten_in_place(
    data, name, original, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for suffix in (".bin", ".idx", ".loss", ".json"):
        for stem in "ab":
            shutil.copy(original / f"a{suffix}", tmp_path / f"{stem}{suffix}")
    (tmp_path / "c.toml").write_text(CONFIG + "[data]\n" + data)

    def opened():
        return open_data(load("c.toml"))

    config, before = opened()
    setup = shard(config, devices=jax.devices()[:1])
    made = identity(setup, before.fingerprint, {})
    assert check_identity(made, setup, opened()[1], "step 1", {}) == []
    content = bytearray((tmp_path / name).read_bytes())
    content[3000:3100] = bytes(100)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="the corpus is not the one this run was trained on"):
        check_identity(made, setup, opened()[1], "step 1", {})


@pytest.mark.parametrize("most_open", [0, 100])
@pytest.mark.parametrize("name", ["a.bin", "a.loss"])
@pytest.mark.parametrize("size", [0, 1, 2500, 4095])
def test_a_file_that_shrinks_while_it_is_read_is_a_line(
    name, size, most_open, tmp_path, monkeypatch
):
    """And the process lives: of a mapped file it would be killed."""
    monkeypatch.setattr("spmdtrain.data.token_files.rows.MOST_OPEN", most_open)
    write(tmp_path / "a")
    (tmp_path / "c.toml").write_text(CONFIG + '[data]\ncorpus = "tokens"\n')
    config = load(tmp_path / "c.toml", [f"data.path={tmp_path}/a.bin"])
    config, data = open_data(config)
    assert isinstance(data, CorpusData)
    samples = data.train_samples(config)
    samples(np.arange(50))
    os.truncate(tmp_path / name, size)
    with pytest.raises(DataError, match=rf"{name} was cut short while it was in use"):
        for step in range(20):
            samples(step * 50 + np.arange(50))


def test_the_command_ends_with_the_code_of_the_data(tmp_path):
    """In a process of its own, which must not end by a signal."""
    write(tmp_path / "a")
    code = (
        "import os, sys, numpy as np;"
        "from spmdtrain.config.errors import UserError;"
        "from spmdtrain.data.corpus import token_corpus;"
        "from spmdtrain.data.batches import EvalWindows, Range;"
        "path = sys.argv[1]; corpus = token_corpus([path]);"
        "windows = EvalWindows(corpus, Range(0, 5000), 8);"
        "windows.samples(np.arange(3)); os.truncate(path, 100);\n"
        "try: windows.samples(np.arange(600))\n"
        "except UserError as error: sys.exit(error.exit_code)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.bin")], check=False)
    assert result.returncode == 5
