"""What somebody may have meant is said, in the words of this program and on one plain line."""

import importlib.metadata
import os
from pathlib import Path
from typing import cast

import jax
import pytest

from spmdtrain.cli import main
from spmdtrain.config import CheckpointError, ConfigError
from spmdtrain.config.arguments import as_run
from spmdtrain.config.run_files import RunFiles
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.start.directory import only_run
from spmdtrain.train.setup import Setup

CONFIG = '[model]\nlayers = 1\nembed = 16\nheads = 1\n[data]\ncorpus = "synthetic"\n'


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)


def said(command: list[str], capsys, code: int = 4) -> str:
    assert main(command) == code
    line = capsys.readouterr().err
    assert line.startswith("spmdtrain: ") and line.count("\n") == 1
    assert line.rstrip("\n").isprintable()
    return line


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train c.toml --seed 3", "--set train.seed=...?"),
        ("train c.toml --batch-size 3", "--set train.global_batch=...?"),
        ("train c.toml --train.steps=3", "--set train.steps=...?"),
        ("train c.toml train.steps=3", "--set train.steps=...?"),
        ("sample run --max-new-tokens 3", "--length?"),
        ("evaluate run", "eval?"),
        ("show c.toml --set mesh.dp=2", "mesh.data?"),
        ("show c.toml --set optimizer.lr=1", "optimizer.learning_rate?"),
        ("show c.toml --set batch_size=4", "train.global_batch?"),
        ("show c.toml --set precision.compute=fp32", "'float32'?"),
        ("show c.toml --set checkpoint.keep=Best", "an integer or 'best', did you mean 'best'?"),
        ("show c.toml --set train.clip=nine", "a number or 'none'"),
        (f"show c.toml --set train.steps={'9' * 5000}", "an integer of fewer digits"),
        ("eval run --step 99999999999999999999", "a whole number of at most 18 digits"),
        ("eval run --step 00", "a whole number of at least 1"),
        ("show c.toml --set \x1b[2J\u202e.a=1", r'"\u001b[2J\u202e"'),
        ("show \x1b[2J", r"\x1b[2J"),
    ],
)
def test_a_near_name(typed, meant, capsys):
    assert meant in said(typed.split(" "), capsys)


def test_none_in_a_file(capsys):
    Path("c.toml").write_text(f"{CONFIG}[train]\nclip = 'None'\n")
    assert "must be a number or 'none', did you mean 'none'?" in said(["show", "c.toml"], capsys)


def test_a_mark_of_utf8_that_windows_writes(capsys):
    Path("c.toml").write_text(f"\ufeff{CONFIG}", encoding="utf-8")
    assert main(["train", "c.toml", "--print-config"]) == 0
    assert "embed = 16" in capsys.readouterr().out


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == ["spmdtrain", importlib.metadata.version("spmdtrain")]


@pytest.mark.parametrize("command", ["train c.toml --run", "eval", "sample"])
@pytest.mark.parametrize("run", ["gs://bucket/run", "file:///tmp/run", ""])
def test_a_run_is_in_a_folder(command, run, capsys):
    """Else an address would be a folder called `gs:`, and nothing the folder at hand."""
    assert ("is an address" if run else "is not a path") in said([*command.split(), run], capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["c.toml"]


def test_a_folder_with_two_slashes_is_the_one_with_one():
    assert as_run("//some/run", "run") == Path("/some/run")
    assert as_run(Path("a:b"), "run") == Path("a:b")


def test_what_is_no_file_of_a_run_is_said_once():
    Path("config.json").mkdir()
    with pytest.raises(CheckpointError) as caught:
        _ = RunFiles(".").config
    assert str(caught.value).count("is not a run directory") == 1


def test_a_lock_that_is_nested_deeply_names_nobody():
    Path("lock").write_text("[" * 100_000)
    with only_run(Path()):
        assert "pid" in Path("lock").read_text()


def test_a_working_directory_that_is_gone(capsys):
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()
    said(["show", "c.toml"], capsys, 10)


def test_a_step_is_compiled():
    with jax.disable_jit(), pytest.raises(ConfigError, match="unset JAX_DISABLE_JIT"):
        lower_step(cast(Setup, None))


def test_an_error_in_python_is_plain_too():
    assert str(ConfigError("a\x07b\x9b2J c")) == r"a\x07b\x9b2J c"
