"""A bad step leaves a bundle, from which it is taken again; a bundle is data of somebody else."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import mesh_of, tiny

from spmdtrain.config import CheckpointError
from spmdtrain.config.errors import DivergedError
from spmdtrain.lab.replay.replay import replay
from spmdtrain.running import loop
from spmdtrain.running.start import compiling

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

SETTINGS = (
    "train.steps=6",
    "model.layers=1",
    "model.embed=16",
    "train.global_batch=8",
    "optimizer.schedule=constant",
    "checkpoint.every=3",
    "mesh.data=2",
)
BAD = 4


def run(directory: Path, *overrides: str) -> Path:
    settings = (*SETTINGS, *overrides)
    loop.run(tiny(*settings), directory, devices=jax.devices()[: mesh_of(settings)])
    return directory


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A run that ended at its fourth step, and has a checkpoint after the third."""
    directory = run(tmp_path_factory.mktemp("ended") / "run", "train.steps=3")
    with pytest.raises(DivergedError):
        run(directory, "guard.grad_norm=1e-6")
    return directory


def test_a_bad_step_leaves_a_small_bundle_without_code_or_weights(ended):
    folder = ended / "bundles" / str(BAD)
    files = {path.name: path for path in folder.iterdir()}
    assert files.keys() == {
        *("bundle.json", "start.json", "compiled.json"),
        *("metrics.jsonl", "steps.jsonl", "samples.npz"),
    }
    assert sum(path.stat().st_size for path in files.values()) < 1_000_000
    with np.load(files["samples.npz"], allow_pickle=False) as rows:
        assert rows["sample"].tolist() == list(range(24, 32))
    document = json.loads(files["bundle.json"].read_text())
    assert (document["step"], document["from_step"], document["event"]) == (BAD, 3, "diverged")
    assert [path.name for path in (ended / "bundles").iterdir()] == [str(BAD)]


@pytest.mark.core
def test_a_bundle_is_replayed_to_the_bit_wherever_it_lies(ended, tmp_path):
    found = replay(ended / "bundles" / str(BAD))
    assert (found.equal, found.start, found.last, found.samples) == (True, 3, BAD, (24, 31))
    sent = tmp_path / "sent"
    shutil.copytree(ended / "bundles" / str(BAD), sent)
    assert replay(sent).equal
    line = json.loads((sent / "steps.jsonl").read_text().splitlines()[-1])
    (sent / "steps.jsonl").write_text(json.dumps(line | {"tokens": "1" * 16}))
    assert replay(sent).first.kind == "tokens"


def test_a_crash_leaves_one_too(tmp_path, monkeypatch):
    compile_step = compiling.compile_step

    def planted(setup, lowered):
        step, report = compile_step(setup, lowered)

        def broken(state, batch):
            if int(state.step) == 3:
                raise RuntimeError("a device is gone")
            return step(state, batch)

        return broken, report

    monkeypatch.setattr(compiling, "compile_step", planted)
    with pytest.raises(RuntimeError):
        run(tmp_path / "run")
    document = json.loads((tmp_path / "run/bundles/4/bundle.json").read_text())
    assert (document["event"], document["from_step"]) == ("crashed", 3)
    assert "a device is gone" in document["why"]


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


@pytest.mark.parametrize("how", ["pickle", "entry", "start", "manifest", "checkpoint"])
def test_a_strange_bundle_is_refused(ended, tmp_path, monkeypatch, how):
    sent = tmp_path / "sent"
    shutil.copytree(ended / "bundles" / str(BAD), sent)
    monkeypatch.chdir(tmp_path)
    document = json.loads((sent / "bundle.json").read_text())
    if how == "pickle":
        rows = np.empty(8, object)
        rows[:] = Evil()
        np.savez(sent / "samples.npz", sample=np.arange(8, dtype=np.uint32), tokens=rows)
    elif how == "entry":
        np.savez(sent / "samples.npz", sample=np.arange(8), other=np.arange(8))
    elif how == "start":
        (sent / "start.json").write_text("{}")
    elif how == "manifest":
        (sent / "bundle.json").write_text(json.dumps(document | {"from_step": "3"}))
    else:
        named = str(tmp_path / "nowhere/checkpoints/3")
        (sent / "bundle.json").write_text(json.dumps(document | {"checkpoint": named}))
    with pytest.raises(CheckpointError):
        replay(sent)
    assert not (tmp_path / "evil").exists()
