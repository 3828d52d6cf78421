"""The search: the published 1T layout, refusals, and what the commands print."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdtrain.cli import main
from spmdtrain.config import ConfigError, load, resolved
from spmdtrain.planner import search
from spmdtrain.planner.hardware import DEVICES
from spmdtrain.planner.job import Job, Layout, Shape
from spmdtrain.planner.stack import stack

TRILLION = Shape(128, 25600, 160, 160, 160, 102400, 51200, positions=2048, dropout=True)
A100, H100 = DEVICES["a100-80"], DEVICES["h100"]
SMALL = """
[model]
name = "llama"
layers = 8
embed = 512
heads = 8
kv_heads = 8
vocab = 32768
[train]
global_batch = 32
microbatch = 1
sequence_length = 1024
[precision]
compute = "bfloat16"
"""


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_the_published_layout_of_1t_is_among_the_best():
    job = Job(TRILLION, 2048, 3072, 1)
    start = time.process_time()
    plans = search.search(job, 3072, A100, stack("megatron-2021", "a100-80"))
    assert time.process_time() - start < 5  # 0.02 s on an idle core; the issue asks for 0.5
    published = [at for at, plan in enumerate(plans) if plan.job.layout == Layout(64, 6, tensor=8)]
    assert published[0] < 20
    assert plans[published[0]].price.step < 1.1 * plans[0].price.step


def test_plans_are_in_order_and_say_why_they_lost():
    job = Job(Shape(32, 4096, 32, 8, 128, 14336, 128256, gated=True, tied=False, bias=False), 4096, 256, 1)
    plans = search.search(job, 64, H100, stack("spmdtrain", "h100"))
    fitting = [plan for plan in plans if plan.memory.total <= 0.8 * H100.memory]
    assert plans[: len(fitting)] == fitting and 0 < len(fitting) < len(plans)
    steps = [plan.price.step for plan in fitting]
    assert steps == sorted(steps)
    assert all(plan.job.layout.devices == 64 for plan in plans)
    assert fitting[-1].why.endswith(("(network)", "(idle)", "(compute)", "(memory)"))
    assert plans[-1].why.startswith("needs ")


def test_what_fits_nowhere_is_one_line_with_what_would_help():
    with pytest.raises(ConfigError, match=r"fits nowhere.*1e\+03 G.*--devices \d+"):
        search.search(Job(TRILLION, 2048, 3072, 1), 8, A100, stack("spmdtrain", "a100-80"))
    with pytest.raises(ConfigError, match="no layout divides the batch"):
        odd = Shape(8, 512, 7, 7, 64, 2048, 32768)
        search.search(Job(odd, 1024, 1, 1), 11, H100, stack("spmdtrain", "h100"))


def test_estimate_and_plan_agree_and_the_line_to_paste_works(config, capsys):
    assert main(["plan", config, "--devices", "8", "--hardware", "h100", "--top", "3", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["step_seconds"] for plan in plans] == sorted(plan["step_seconds"] for plan in plans)
    assert main(["plan", config, "--devices", "8", "--hardware", "h100"]) == 0
    pasted = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert main(["estimate", config, "--hardware", "h100", "--devices", "8", "--json", *pasted]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == pytest.approx(plans[0]["step_seconds"])
    assert found["layout"] == plans[0]["layout"]
    memory = found["memory_bytes_per_device"]
    names = ["parameters", "gradients", "optimizer", "activations", "logits", "buffers"]
    assert memory["total"] == sum(memory[name] for name in names)
    assert found["step_seconds"] == pytest.approx(sum(found["breakdown_seconds"].values()))
    keys = "tokens_per_second_per_device model_tflops_per_device mfu bubble_fraction fits"
    assert set(keys.split()) <= set(found)


def test_attention_that_writes_its_scores_out_costs_more(config, capsys):
    found = []
    for attention in ("auto", "xla"):
        assert main(["estimate", config, "--hardware", "h100", "--json", "--set", f"model.attention={attention}"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    bounds = [each["bound_by"]["attention"] for each in found]
    assert bounds == ["compute", "memory"]
    assert found[1]["breakdown_seconds"]["attention"] > 2 * found[0]["breakdown_seconds"]["attention"]


def test_estimate_for_a_person_sweeps_and_generation(config, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["estimate", config, "--hardware", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s per device" in shown and "network per device" in shown and "matmul" in shown
    command = ["estimate", config, "--hardware", "h100", "--json"]
    assert main([*command, "--sweep", "hardware.memory_bandwidth=1e12,2e12,4e12"]) == 0
    steps = [row["step_seconds"] for row in json.loads(capsys.readouterr().out)]
    assert steps[0] > steps[1] > steps[2]
    found = []
    command = ["estimate", "configs/llama3_8b.toml", "--hardware", "h100", "--devices", "1", "--json"]
    for batch in ("1", "256"):
        assert main([*command, "--generate", "512+64", "--batch", batch]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["decode_bound"] == "memory"
    weights_once = found[0]["weight_bytes"] / (0.85 * H100.memory_bandwidth)
    assert found[0]["token_seconds"] > weights_once
    assert found[1]["tokens_per_second"] > 20 * found[0]["tokens_per_second"]


@pytest.fixture
def measured(config, tmp_path):
    """The directory of a run whose steps took 9, 3 and 5 seconds: its first one holds what compiling left over."""
    lines = [{"step": step, "step_seconds": took} for step, took in enumerate((9, 3, 5), start=1)]
    mesh = dict.fromkeys(("pipeline", "data", "fsdp", "expert", "context", "tensor"), 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(resolved(load(config))))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text(json.dumps({"event": "started", "step": 0, "mesh": mesh}) + "\n")
    return run


def test_a_measured_run_anchors_the_estimate(config, measured, capsys):
    assert main(["estimate", config, "--hardware", "h100", "--anchor", str(measured), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(4)


DAMAGED = {
    "config.json": ["[1]", "5", "{", "{}"],
    "metrics.jsonl": ["", "[1]", "5", "{", '{"step_seconds": 1}', '{"step": 9, "step_seconds": []}'],
    "events.jsonl": ["", "[1]", "5", "{", '{"step": 0, "mesh": {}}', '{"step": 0, "mesh": 3}'],
}


@pytest.mark.parametrize(("damaged", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts])
def test_an_anchor_that_is_no_run_is_refused(config, measured, capsys, damaged, text):
    (measured / damaged).write_text(text)
    assert main(["estimate", config, "--hardware", "h100", "--anchor", str(measured)]) == 4
    said = capsys.readouterr().err
    assert said.startswith("spmdtrain: ") and said.count("\n") == 1


@pytest.mark.parametrize("command", [("estimate",), ("plan", "--devices", "8", "--rules")])
def test_a_gpu_that_is_there_is_left_alone(config, command):
    """jax reads which platforms it may start when it is imported."""
    program = (
        "import sys; from spmdtrain.cli import main; main(sys.argv[1:]); import jax; print(jax.config.jax_platforms)"
    )
    arguments = [sys.executable, "-c", program, command[0], config, "--hardware", "h100", *command[1:]]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "cpu"


def test_a_run_ends_with_predicted_compiled_and_measured_figures(config, tmp_path, capsys):
    run = tmp_path / "run"
    settings = ["mesh.data=8", "train.steps=4", "train.sequence_length=16", "model.layers=1", "model.embed=32"]
    settings += ["model.vocab=256", "data.corpus=synthetic", "checkpoint.every=0"]
    pasted = [part for setting in settings for part in ("--set", setting)]

    def trained(*more) -> tuple[str, dict]:
        """(the last three lines, summary.json)"""
        assert main(["train", config, "--run", str(run), "--fresh", *more, *pasted]) == 0
        return capsys.readouterr().out.splitlines()[-3:], json.loads((run / "summary.json").read_text())

    shown, found = trained("--hardware", "h100")
    compiled = json.loads((run / "compiled.json").read_text())["memory"]
    memory, steps = found["memory_bytes"], found["step_seconds"]
    assert main(["estimate", config, "--hardware", "h100", "--json", *pasted]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert steps["predicted"] == estimate["step_seconds"]
    assert memory["predicted"] == estimate["memory_bytes_per_device"]["total"]
    assert memory["compiled"] >= compiled["argument_bytes"] + compiled["temp_bytes"]
    assert memory["error"] == pytest.approx(memory["predicted"] / memory["compiled"] - 1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = sorted(line["step_seconds"] for line in lines if "step_seconds" in line and line["step"] > 1)
    assert steps["measured"] == taken[1] and len(taken) == 3
    assert steps["error"] == pytest.approx(steps["predicted"] / steps["measured"] - 1)
    assert shown[0].split()[:3] == ["predicted", "compiled", "measured"]
    assert f"{steps['predicted']:.4g} s" in shown[1] and f"{steps['measured']:.4g} s" in shown[1]

    shown, found = trained()  # no hardware is named, and a CPU is none that is described
    assert shown[0].split() == ["compiled", "measured"]
    assert found["hardware"] is None and found["memory_bytes"]["predicted"] is None
    assert found["memory_bytes"]["compiled"] == memory["compiled"] and found["step_seconds"]["measured"] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("estimate", "--hardware", "h1000"), "unknown hardware"),
        (("estimate", "--hardware", "h100", "--devices", "3"), "does not fit the 3 devices"),
        (("estimate", "--hardware", "h100", "--set", "mesh.data=-1"), "--devices N"),
        (("estimate", "--hardware", "h100", "--set", "mesh.tensor=3"), "kv_heads=8 is not divisible"),
        (("estimate", "--hardware", "h100", "--set", "mesh.data=64"), "global_batch"),
        (("estimate", "--hardware", "h100", "--set", "mesh.tensor=16"), "mesh.tensor=16 would cross hosts"),
        (("estimate", "--hardware", "h100", "--set", "mesh.context=3"), "time=1024 is not divisible"),
        (("estimate", "--hardware", "h100", "--sweep", "memory=1"), "--sweep hardware"),
        (("estimate", "--hardware", "h100", "--sweep", "hardware.memroy=1"), "no such figure"),
        (("estimate", "--hardware", "h100", "--generate", "512"), "not PROMPT+NEW"),
        (("estimate", "--hardware", "h100", "--anchor", "nowhere"), "cannot read a run"),
    ],
)
def test_mistakes_are_one_line(config, capsys, arguments, complaint):
    command, *rest = arguments
    assert main([command, config, *rest]) == 4
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
