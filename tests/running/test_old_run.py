"""A run directory that version 0.1.0 has written: later versions go on with it and sample from it.

`tests/fixtures/run_of_0_1_0` holds the run after 3 steps. It is never made anew: a change of format
keeps it and adds one beside it.
"""

import json
import shutil
from pathlib import Path

import pytest

from spmdtrain.cli import main

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_of_0_1_0"
STEPS = 5


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    """A copy of the fixture as working directory."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def train(run: str, *overrides: str) -> list[float]:
    """Trains up to step 5; the losses of all steps in the run's metrics."""
    settings = [
        argument for text in (f"train.steps={STEPS}", *overrides) for argument in ("--set", text)
    ]
    assert main(["train", "fox.toml", "--run", run, *settings]) == 0
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


@pytest.mark.core
@pytest.mark.seconds
def test_it_goes_on_as_if_it_had_never_stopped(capsys):
    mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.context=2")
    settings = (*mesh, "guard.policy=skip")  # judges by steps that the run did not keep
    resumed = train("run", *settings)
    said = capsys.readouterr().out
    assert "resumed run at step 3" in said
    assert len(resumed) == STEPS
    fresh = train("fresh", *settings)
    assert resumed == pytest.approx(fresh, rel=1e-5)


@pytest.mark.long
def test_it_gives_its_weights_to_a_pipeline():
    losses = train(
        "piped", "train.init_from=run", "mesh.pipeline=2", "mesh.data=4", "train.microbatch=1"
    )
    before = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert losses[0] < before - 0.02


@pytest.mark.seconds
def test_it_is_sampled_from(capsys):
    assert main(["sample", "run", "--prompt", "The ", "--length", "6", "--temperature", "0"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert text.startswith("The ") and len(text) == len("The ") + 6
