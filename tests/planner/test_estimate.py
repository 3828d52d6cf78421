"""`spmdtrain estimate`: what it prints, what it refuses, and that a run predicts the same."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdtrain.cli import main
from spmdtrain.planner.cost.hardware import DEVICES

H100 = DEVICES["h100"]


def test_attention_that_writes_its_scores_out_costs_more(config, capsys):
    found = []
    for attention in ("auto", "xla"):
        setting = f"model.attention={attention}"
        assert main(["estimate", config, "--hardware", "h100", "--json", "--set", setting]) == 0
        found.append(json.loads(capsys.readouterr().out))
    bounds = [each["bound_by"]["attention"] for each in found]
    assert bounds == ["compute", "memory"]
    assert (
        found[1]["breakdown_seconds"]["attention"] > 2 * found[0]["breakdown_seconds"]["attention"]
    )


def test_estimate_prints_a_report(config, capsys):
    assert main(["estimate", config, "--hardware", "h100"]) == 0
    shown = capsys.readouterr().out
    for words in ("tokens/s per device", "network per device", "matmul"):
        assert words in shown


def test_a_sweep_estimates_at_each_value(config, capsys):
    command = ["estimate", config, "--hardware", "h100", "--json"]
    assert main([*command, "--sweep", "hardware.memory_bandwidth=1e12,2e12,4e12"]) == 0
    steps = [row["step_seconds"] for row in json.loads(capsys.readouterr().out)]
    assert steps[0] > steps[1] > steps[2]


def test_decoding_reads_all_weights_for_every_token(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    command = ["estimate", "configs/llama3_8b.toml", "--hardware", "h100", "--devices", "1"]

    def estimate(batch: int) -> dict:
        options = ["--json", "--generate", "512+64", "--batch", str(batch)]
        assert main([*command, *options]) == 0
        return json.loads(capsys.readouterr().out)

    one = estimate(1)
    many = estimate(256)
    assert one["decode_bound"] == "memory"
    assert one["token_seconds"] > one["weight_bytes"] / (0.85 * H100.memory_bandwidth)
    assert many["tokens_per_second"] > 20 * one["tokens_per_second"]


@pytest.mark.seconds
@pytest.mark.parametrize("command", [("estimate",), ("plan", "--devices", "8", "--rules")])
def test_a_gpu_that_is_there_is_left_alone(config, command):
    """jax reads which platforms it may start when it is imported."""
    program = (
        "import sys; from spmdtrain.cli import main; main(sys.argv[1:]); "
        "import jax; print(jax.config.jax_platforms)"
    )
    name, *options = command
    arguments = [sys.executable, "-c", program, name, config, "--hardware", "h100", *options]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "cpu"


TINY_RUN = [
    "mesh.data=8",
    "train.steps=4",
    "train.sequence_length=16",
    "model.layers=1",
    "model.embed=32",
    "model.vocab=256",
    "data.corpus=synthetic",
    "checkpoint.every=0",
]


@pytest.mark.seconds
def test_a_run_ends_with_predicted_compiled_and_measured_figures(config, tmp_path, capsys):
    run = tmp_path / "run"
    pasted = [part for setting in TINY_RUN for part in ("--set", setting)]

    def trained(*options) -> tuple[str, dict]:
        """(the last two lines, summary.json)"""
        assert main(["train", config, "--run", str(run), "--fresh", *options, *pasted]) == 0
        lines = capsys.readouterr().out.splitlines()
        return lines[-2:], json.loads((run / "summary.json").read_text())

    shown, summary = trained("--hardware", "h100")
    memory = summary["memory_bytes"]
    seconds = summary["step_seconds"]

    assert main(["estimate", config, "--hardware", "h100", "--json", *pasted]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert seconds["predicted"] == estimate["step_seconds"]
    assert memory["predicted"] == estimate["memory_bytes_per_device"]["total"]

    compiled = json.loads((run / "compiled.json").read_text())["memory"]
    assert memory["compiled"] >= compiled["argument_bytes"] + compiled["temp_bytes"]
    assert memory["error"] == pytest.approx(memory["predicted"] / memory["compiled"] - 1)

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [
        line["step_seconds"] for line in metrics if "step_seconds" in line and line["step"] > 1
    ]
    assert len(taken) == 3
    assert seconds["measured"] == sorted(taken)[1]
    assert seconds["error"] == pytest.approx(seconds["predicted"] / seconds["measured"] - 1)

    assert shown[0] == (
        f"median step time   {seconds['measured']:.4g} s measured, "
        f"{seconds['predicted']:.4g} s predicted for h100 ({seconds['error']:+.1%})"
    )
    assert re.fullmatch(
        r"memory per device  [\d.]+ [MG]B by the compiler's account, "
        r"[\d.]+ [MG]B predicted for h100 \([+-][\d.]+%\)",
        shown[1],
    )

    # Without --hardware nothing is predicted: no CPU is among the known devices.
    shown, unnamed = trained()
    assert shown[0].endswith(" s measured") and shown[1].endswith(" by the compiler's account")
    assert unnamed["hardware"] is None
    assert unnamed["memory_bytes"]["predicted"] is None
    assert unnamed["memory_bytes"]["compiled"] == memory["compiled"]
    assert unnamed["step_seconds"]["measured"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--hardware", "h1000"), "unknown hardware"),
        (("--devices", "3"), "does not fit the 3 devices"),
        (("--set", "mesh.data=-1"), "--devices N"),
        (("--set", "mesh.tensor=3"), "kv_heads=8 is not divisible"),
        (("--set", "mesh.data=64"), "global_batch"),
        (("--set", "mesh.tensor=16"), "mesh.tensor=16 would cross hosts"),
        (("--set", "mesh.context=3"), "time=1024 is not divisible"),
        (("--sweep", "memory=1"), "--sweep hardware"),
        (("--sweep", "hardware.memroy=1"), "no such figure"),
        (("--generate", "512"), "not PROMPT+NEW"),
        (("--anchor", "nowhere"), "cannot read a run"),
    ],
)
def test_mistakes_are_one_line(config, capsys, arguments, complaint):
    hardware = () if "--hardware" in arguments else ("--hardware", "h100")
    assert main(["estimate", config, *hardware, *arguments]) == 4
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
