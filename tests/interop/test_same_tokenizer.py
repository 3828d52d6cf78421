"""Wherever weights meet data or other weights, another tokenizer is refused in one line."""

import json
import shutil
from pathlib import Path

import directories
import jax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import ConfigError
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer
from spmdtrain.running.islands.island import Island
from spmdtrain.running.islands.meetings import Meetings
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.start.init_from import check_source
from spmdtrain.running.start.sharding import shard_with_weights

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<|endoftext|>", "<|im_start|>"]
SIZE = 256 + len(SPECIAL)
MODEL = ("model.name=llama", "model.layers=1", f"model.vocab={SIZE}")


def write_tokenizer(path: Path, special: list[str]) -> None:
    """A byte-level tokenizer whose first ids are these tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=0, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two tokenizers in which two special tokens have each other's ids."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, special in (("ours", SPECIAL), ("other", SPECIAL[::-1])):
        write_tokenizer(folder / f"{name}.json", special)
    return folder


@pytest.fixture
def ours(both):
    return open_tokenizer(str(both / "ours.json")).spec()


def run_of(folder: Path, tokenizer: dict | None, *settings: str) -> Path:
    """The directory of a run whose data had this tokenizer, with step 0."""
    setup = st.shard(tiny(*MODEL, *settings), devices=jax.devices()[:1])
    st.save(setup, st.init_state(setup), folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"tokenizer": tokenizer}))
    return folder


def published(folder: Path, tokenizer: Path) -> Path:
    directories.write(folder, directories.CONFIGS["llama"])
    shutil.copy(tokenizer, folder / "tokenizer.json")
    return folder


MADE = {
    "a run": lambda folder, file: run_of(folder, open_tokenizer(str(file)).spec()),
    "a published model": published,
}


@pytest.mark.parametrize("make", MADE)
def test_weights_that_a_run_starts_from(make, both, ours, tmp_path):
    source = MADE[make](tmp_path / "weights", both / "other.json")
    asked = tiny(f"train.init_from={source}")
    words = r"another tokenizer than the data; asked .*ours.json.*; found .*: id 0 is '<\|im_start"
    with pytest.raises(ConfigError, match=words):
        check_source(asked, ours, tmp_path / "new", False)
    check_source(asked, None, tmp_path / "new", False)  # ids of an unknown tokenizer
    check_source(asked, open_tokenizer(str(both / "other.json")).spec(), tmp_path / "new", False)
    meant = tiny(f"train.init_from={source}", "train.new_tokenizer=true")
    check_source(meant, ours, tmp_path / "new", False)


def test_the_setting_is_of_init_from():
    with pytest.raises(ConfigError, match="new_tokenizer belongs to train.init_from"):
        tiny("train.new_tokenizer=true")


@pytest.mark.parametrize("make", MADE)
def test_a_teacher(make, both, ours, tmp_path):
    folder = MADE[make](tmp_path / "teacher", both / "other.json")
    vocab = directories.VOCAB if make == "a published model" else SIZE
    config = tiny(f"distill.teacher={folder}", f"model.vocab={vocab}")
    with pytest.raises(ConfigError, match="distill.teacher=.* has another tokenizer than the data"):
        shard_with_weights(config, None, jax.devices()[:1], ours)
    shard_with_weights(config, None, jax.devices()[:1], None)


def test_adapters_that_are_merged(both, ours, tmp_path):
    lora = ("finetune.kind=lora", "finetune.rank=1")
    one = run_of(tmp_path / "one", ours, *lora)
    other = run_of(tmp_path / "two", open_tokenizer(str(both / "other.json")).spec(), *lora)
    with pytest.raises(ConfigError, match="--with .*two has another tokenizer than .*one"):
        export_run(one, tmp_path / "out", also=[other])
    export_run(one, tmp_path / "out", also=[one])


def test_islands(both, ours, tmp_path):
    """Their data differ, and their tokenizer may not."""
    settings = ("islands.count=2", "islands.every=1", f"islands.directory={tmp_path / 'm'}")
    setups = [
        st.shard(tiny(*MODEL, *settings, f"islands.index={index}"), devices=jax.devices()[:1])
        for index in range(2)
    ]
    meetings = [Meetings(tmp_path / "m", index, patience=0.0) for index in range(2)]
    Island(setups[0], meetings[0], {"run": 0}, ours)
    Island(setups[1], meetings[1], {"run": 1}, ours)
    other = open_tokenizer(str(both / "other.json")).spec()
    with pytest.raises(ConfigError, match="the tokenizer of the data differs, and islands"):
        Island(setups[1], meetings[1], {"run": 1}, other)


def test_a_refused_run_touches_no_directory(both, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "first", ours)
    Path("t.txt").write_text("the answer is a number\n" * 200)
    command = ["data", "prepare", "t.txt", "--tokenizer", str(both / "other.json"), "--out", "t"]
    assert main(command) == 0
    Path("c.toml").write_text(
        '[model]\nname = "llama"\nlayers = 1\n[mesh]\ndata = 8\n'
        '[data]\ncorpus = "tokens"\npath = "t.bin"\n'
    )
    assert main(["train", "c.toml", "--run", "second", "--set", "train.init_from=first"]) == 4
    assert "has another tokenizer than the data" in capsys.readouterr().err
    assert not Path("second").exists()
