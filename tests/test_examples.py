"""The examples do what their first lines promise."""

import importlib.util
import inspect
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CHEAP_FLAGS

from spmdtrain.config import GPT, ConfigError, DataConfig, RunConfig, TrainConfig
from spmdtrain.parallel.axes import AXES
from spmdtrain.show import show

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# Steps of each run; a loss before training, ln 256 = 5.5 or a little less.
STEPS, UNTRAINED = 12, 5.2


RUNS = {
    "train_gpt": ["train_gpt.py"],
    "one": ["custom_model.py", "--mesh", "one"],
    "split": ["custom_model.py", "--mesh", "split"],
    "stages": ["custom_model.py", "--mesh", "stages"],
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of RUNS printed; they share a working directory and run at the same time."""
    cwd = tmp_path_factory.mktemp("examples")
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": CHEAP_FLAGS}
    processes = {}
    try:
        for name, (script, *arguments) in RUNS.items():
            command = [sys.executable, EXAMPLES / script, "--steps", str(STEPS), *arguments]
            with (cwd / name).open("w") as log:
                processes[name] = subprocess.Popen(
                    command, cwd=cwd, env=env, stdout=log, stderr=subprocess.STDOUT
                )
        ended = {name: process.wait(timeout=240) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    text = {name: (cwd / name).read_text() for name in RUNS}
    assert set(ended.values()) == {0}, text
    return text | {"in": cwd}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def equal(one: list[float], other: list[float]) -> bool:
    return len(one) == STEPS and other == pytest.approx(one, rel=1e-5, abs=0)


@pytest.fixture(scope="module")
def custom_model():
    spec = importlib.util.spec_from_file_location("custom_model", EXAMPLES / "custom_model.py")
    module = sys.modules["custom_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["custom_model"]


def test_every_example_is_run_by_a_test_and_short_enough_to_read():
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.keys() == {
        "train_gpt.py",
        "custom_model.py",
        "hybrid.py",
        "encoder.py",
        "own_parts.py",
    }
    assert lines["train_gpt.py"] < 60
    assert lines["custom_model.py"] <= 85
    assert lines["own_parts.py"] < 80  # run by tests/running/test_own_by_name.py
    assert lines["hybrid.py"] < 100  # run by tests/checkpoints/test_own_model_by_name.py
    assert lines["encoder.py"] < 100  # run by tests/train/test_encoder.py


def test_train_gpt_shows_the_loss_falling_alike_on_one_device_and_on_eight(printed):
    header, *rows = printed["train_gpt"].splitlines()
    assert header.startswith("step  1 device    8 devices")
    one, eight = ([float(row.split()[column]) for row in rows] for column in (1, 2))
    assert one[0] > UNTRAINED
    assert one[-1] < one[0] - 1
    assert equal(one, eight)


def test_a_model_of_ones_own_trains_alike_on_data_fsdp_tensor_in_a_pipeline_and_on_one_device(
    printed,
):
    one, split, stages = (
        losses(printed["in"] / f"runs/custom_model_{mesh}") for mesh in ("one", "split", "stages")
    )
    assert "8 x cpu (data 2 x fsdp 2 x tensor 2)" in printed["split"]
    assert "8 x cpu (pipeline 2 x data 2 x tensor 2)" in printed["stages"]
    assert one[0] > UNTRAINED
    assert one[-1] < one[0] - 1
    assert equal(one, split)
    assert equal(one, stages)


@pytest.mark.parametrize("script", ["custom_model.py", "train_gpt.py"])
def test_a_number_of_steps_that_is_none_costs_one_line(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--steps", "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert ended.value.code == ConfigError.exit_code
    assert capsys.readouterr().err == f"{script}: --steps 0 is not a whole number of at least 1\n"


def test_a_model_of_ones_own_is_split_by_its_rules_over_tensor_and_fsdp(custom_model):
    config = RunConfig(
        model=GPT(layers=2, embed=16),
        mesh=custom_model.MESHES["split"],
        train=TrainConfig(sequence_length=8),
        data=DataConfig(corpus="synthetic"),
        rules=custom_model.RULES,
    )
    rows = show.describe(config, custom_model.Convolutions)[0]["parameters"]
    parameters = {row["path"]: row for row in rows}
    up, taps = parameters["blocks.layer.up_cpi"], parameters["blocks.layer.taps_ki"]
    assert up["logical_axes"] == ["layer", "channel", None, "inner"]
    assert up["mesh_axes"] == [[], ["fsdp"], [], ["tensor"]]
    assert up["bytes_per_device"] * 4 == 4 * 2 * 16 * 2 * 64
    assert taps["mesh_axes"] == [[], [], ["tensor"]]
    assert taps["bytes_per_device"] * 2 == 4 * 2 * custom_model.TAPS * 64


def test_a_model_of_ones_own_has_no_distribution_code(custom_model):
    source = inspect.getsource(custom_model.Block) + inspect.getsource(custom_model.Convolutions)
    for word in (*AXES, "mesh", "shard_map", "psum", "PartitionSpec", "with_sharding_constraint"):
        assert word not in source
