"""Paths that cannot be, for every argument that takes one: one line each, and nothing waits."""

import os
from pathlib import Path

import pytest
from helpers import tiny

from spmdtrain.cli import main
from spmdtrain.config import ConfigError
from spmdtrain.running.start.init_from import check_source

CONFIG = '[model]\nlayers = 1\nembed = 16\nheads = 1\n[data]\ncorpus = "synthetic"\n'
LONG = "x" * 300
COMMANDS = [
    "show PATH",
    "train PATH",
    "plan PATH --hardware h100 --devices 8",
    "show c.toml --svg PATH",
    "show c.toml --set model.make=PATH.py:Model",
    "train c.toml --hardware PATH.toml",
    "estimate c.toml --hardware PATH.toml",
    "estimate c.toml --hardware h100 --anchor PATH",
    "sample PATH",
    "eval PATH",
    "sample run --prompts PATH",
    "data prepare PATH --out x",
    "data prepare c.toml --out PATH",
    "data prepare c.toml --out x --tokenizer PATH",
    "tokenizer train PATH --out t.json --vocab 300",
    "tokenizer train c.toml --out PATH --vocab 300",
    "schedule --kind PATH.json",
    "schedule --stages 2 --microbatches 2 --svg PATH",
    "calibrate --out PATH.toml",
    "launch --report PATH train c.toml",
]
# The commands that find a folder or a pipe where a file is to be, and no more than that.
OF_FILES = [
    command
    for command in COMMANDS
    if "PATH." not in command and "prepare" not in command and "anchor" not in command
]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)
    Path("folder").mkdir()
    os.mkfifo("fifo")
    os.mkfifo("fifo.json")
    os.mkfifo("fifo.py")


def refused(command: str, capsys) -> None:
    assert main(command.split()) in (4, 5, 6, 10)
    errors = capsys.readouterr().err
    assert errors.startswith("spmdtrain: ") and errors.count("\n") == 1, errors


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_too_long(command, capsys):
    refused(command.replace("PATH", LONG), capsys)


@pytest.mark.parametrize("command", OF_FILES)
def test_a_folder_in_the_place_of_a_file(command, capsys):
    refused(command.replace("PATH", "folder"), capsys)


@pytest.mark.parametrize(
    "command",
    [
        *(each for each in OF_FILES if "tokenizer" not in each),
        "schedule --kind PATH.json",
        "show c.toml --set model.make=PATH.py:Model",
    ],
)
def test_a_pipe_that_nobody_writes_to_or_reads(command, capsys):
    refused(command.replace("PATH", "fifo"), capsys)


def test_weights_of_hugging_face_without_their_config_are_refused():
    Path("folder/model.safetensors").touch()
    with pytest.raises(ConfigError, match="is not a Hugging Face directory: config.json"):
        check_source(tiny("train.init_from=folder"), None, Path("run"), False)
