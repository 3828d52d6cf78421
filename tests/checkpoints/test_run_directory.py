"""A run directory of any name, and one in which something else lies in the place of a file."""

import json
import os
import shutil
from pathlib import Path

import jax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.checkpoints.files import plain_path
from spmdtrain.checkpoints.files.hostile import FILES, WRITTEN, check_description
from spmdtrain.checkpoints.files.plain_path import PlainPath
from spmdtrain.cli import main
from spmdtrain.config import StorageError, UserError
from spmdtrain.config.run_files import RunFiles
from spmdtrain.running.start.directory import open_directory

pytestmark = pytest.mark.usefixtures("shared_programs")

SETTINGS = (
    "model.layers=1",
    "model.embed=8",
    "model.heads=1",
    "train.steps=2",
    "train.global_batch=1",
    "train.sequence_length=8",
    "optimizer.warmup=0",
    "checkpoint.every=1",
    "checkpoint.keep=1",
)
ONE = jax.devices()[:1]
NAMES = {
    "patterns": "[!a]*?/lr=[1e-3]",
    "separators": "back\\slash/gs:/run",
    "odd characters": os.fsdecode(b"\xff") + "é {b} %20 #\n~ $HOME -x'\"|;&",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    st.run(tiny(*SETTINGS), directory, devices=ONE)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_what_is_saved_can_be_read_whatever_the_directory_is_called(name, tmp_path):
    """Also after a move; older steps are deleted, and nothing is written beside it."""
    run = tmp_path / "here" / name
    st.run(tiny(*SETTINGS), run, devices=ONE)
    assert [path.name for path in (tmp_path / "here").iterdir()] == [Path(name).parts[0]]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    there = st.weights(run)
    moved = tmp_path / "moved"
    run.rename(moved)
    assert there.keys() == st.weights(moved).keys()
    moved.rename(run)
    assert st.run(tiny(*SETTINGS, "train.steps=3"), run, devices=ONE).step == 3
    descriptors = {os.readlink(f"/proc/self/fd/{n}") for n in open_descriptors()}
    assert str(run / "checkpoints") not in descriptors, "the folder's second name is given up"


def open_descriptors() -> list[str]:
    names = os.listdir("/proc/self/fd")
    return [name for name in names if os.path.lexists(f"/proc/self/fd/{name}")]


def test_a_system_without_second_names_refuses_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_path, "OPEN_FOLDERS", tmp_path / "nowhere")
    run = tmp_path / "lr=[1]"
    with pytest.raises(StorageError, match="has characters that checkpoints cannot have") as error:
        st.run(tiny(*SETTINGS), run, devices=ONE)
    assert "\n" not in str(error.value) and not (run / "metrics.jsonl").exists()
    assert PlainPath(tmp_path / "plain").path == tmp_path / "plain"


@pytest.mark.seconds
def test_a_save_that_cannot_be_read_back_is_not_said_to_be_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_path, "PLAIN", plain_path.re.compile(".*", plain_path.re.DOTALL))
    run = tmp_path / "lr=[1]"
    with pytest.raises(StorageError, match="was written but cannot be read back; found params"):
        st.run(tiny(*SETTINGS), run, devices=ONE)
    assert not [event for event in RunFiles(run).events if event["event"] == "saved"]


PLACES = (
    "lock",
    "config.json",
    "config.json.tmp",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "steps.jsonl",
    "starts",
    "bundles/4",
    "profile/step",
    "tensorboard/events",
    "checkpoints",
    "checkpoints/7",
    "checkpoints/quarantine",
    "checkpoints/quarantine/3",
)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_neither_follows_a_link_nor_waits_for_a_pipe(place, kind, tmp_path):
    path = tmp_path / "run" / place
    path.parent.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    if kind == "link":
        path.symlink_to(tmp_path / "outside")
    else:
        os.mkfifo(path)
    said = "is a link" if kind == "link" else "is neither a plain file nor a folder"
    with pytest.raises(UserError, match=said) as error, open_directory(tmp_path / "run", False):
        pass
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("place", [*FILES, *WRITTEN[1:]])
def test_a_folder_for_a_file_or_a_file_for_a_folder_is_refused_at_the_start(place, tmp_path):
    """And not when the file is written: at the end of a run, for summary.json."""
    path = tmp_path / "run" / place
    if place in FILES:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    said = "is a folder; try" if place in FILES else "is no folder; try"
    with pytest.raises(StorageError, match=said), open_directory(tmp_path / "run", False):
        pass


def test_what_is_no_file_in_the_place_of_a_description_is_damage(tmp_path):
    (tmp_path / "_CHECKPOINT_METADATA").mkdir()
    with pytest.raises(ValueError, match="_CHECKPOINT_METADATA in it is not a plain file"):
        check_description(tmp_path)


def documents(run: Path) -> list[Path]:
    """The JSON files of a run, those of its checkpoint among them."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return sorted(path for path in files if path.read_bytes()[:1] == b"{")


HOSTILE = {
    "nested": '{"config":' * 100_000,
    "digits": '{"step": ' + "9" * 5000 + "}",
    "a list": "[1, 2]",
}


@pytest.mark.long
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_any_json_in_the_place_of_a_file_is_a_line_or_does_not_matter(
    content, trained, tmp_path, capfd
):
    names = [path.relative_to(trained) for path in documents(trained)]
    assert {"config.json", "metrics.jsonl", "events.jsonl"} <= {str(name) for name in names}
    assert any("_CHECKPOINT_METADATA" in name.name for name in names)
    for name in names:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        (run / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        for ask in (
            lambda run: st.weights(run),
            lambda run: RunFiles(run).metrics,
            lambda run: st.run_config(run),
            lambda run: st.run(tiny(*SETTINGS), run, devices=ONE),
        ):
            try:
                ask(run)
            except UserError as error:
                assert "\n" not in str(error), name
        assert main(["estimate", str(run / "config.json")]) in (0, 4)
        assert "Traceback" not in capfd.readouterr().err, name


def test_lines_that_a_kill_has_cut_are_left_out(tmp_path):
    lines = [{"step": 1}, {"step": 2}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text[:-5])
    assert RunFiles(tmp_path).metrics == lines[:1]
    (tmp_path / "metrics.jsonl").write_text("{\n" + text)
    with pytest.raises(UserError, match="metrics.jsonl: line 1"):
        RunFiles(tmp_path).metrics  # noqa: B018 - it reads
