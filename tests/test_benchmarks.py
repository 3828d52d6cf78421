"""The benchmarks run and compare like with like. Their figures are for people: nothing here is
timed.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHEAP_FLAGS
from shares import rest

pytestmark = [
    pytest.mark.long,
    rest("runs the programs of benchmarks/; no command of a run calls them"),
]

ROOT = Path(__file__).parent.parent
OVERHEAD = {
    "model.layers": 1,
    "model.embed": 16,
    "model.heads": 2,
    "train.global_batch": 2,
    "train.sequence_length": 8,
    "optimizer.learning_rate": 1e-2,
}
PIPELINE = {
    "model.layers": 4,
    "model.embed": 16,
    "model.heads": 2,
    "model.vocab": 32,
    "train.microbatch": 1,
    "train.sequence_length": 8,
    "mesh.pipeline": 2,
    "mesh.tensor": 2,
}


def ran(command, out):
    """(the figures, all that was printed)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": CHEAP_FLAGS}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    if command[0] != "benchmarks/beside":
        assert result == json.loads(done.stdout.splitlines()[-1])
    return result, done.stdout


def test_the_loop_and_the_bare_step_of_the_overhead_benchmark_train_the_same(tmp_path):
    settings = [part for key, value in OVERHEAD.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "overhead.json"
    command = [
        "benchmarks/overhead.py",
        "--rounds",
        "1",
        "--steps",
        "5",
        "--json",
        str(out),
        *settings,
    ]
    result, shown = ran(command, out)
    assert result["steps"] == 10  # one round and the one that warms up
    assert result["largest_loss_difference"] < 1e-5
    assert set(result["seconds"]) == {"bare, unrolled", "bare, scanned", "step", "loop"}
    assert "loop / bare" in shown


def test_the_guards_benchmark_times_every_guard_of_a_run(tmp_path):
    settings = [part for key, value in OVERHEAD.items() for part in ("--set", f"{key}={value}")]
    sizes = ("--steps", "20", "--rounds", "1", "--set", "checkpoint.every=5")
    out = tmp_path / "guards.json"
    result, shown = ran(["benchmarks/guards.py", *sizes, "--json", str(out), *settings], out)
    assert len(result["host_us"]) == 5 and min(result["host_us"].values()) > 0
    assert len(result["save_ms"]) == 4 and min(result["save_ms"].values()) > 0
    assert result["save_ms"]["fingerprints"] < result["save_ms"]["all of saving"]
    assert result["host_ms"] == pytest.approx(sum(result["host_us"].values()) / 1000)
    assert "a save holds the loop for" in shown


def test_the_pipelines_of_the_benchmark_have_the_same_gradients(tmp_path):
    settings = [part for key, value in PIPELINE.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "pipeline.json"
    sizes = ["--microbatches", "4", "--timed", "4", "--rounds", "1", "--remat", "full"]
    result, shown = ran(["benchmarks/pipeline.py", *sizes, "--json", str(out), *settings], out)
    assert 0 < result["largest_gradient_difference"] < 1e-5  # other orders of summation
    assert len(result["temp_bytes"]) == 5 and all(
        sizes["4"] > 0 for sizes in result["temp_bytes"].values()
    )
    assert "interleaved, v=2, full / circular scan, v=2, full" in shown


def test_our_step_is_compared_with_the_same_by_hand_and_in_torch_where_that_is(tmp_path):
    out = tmp_path / "beside.json"
    command = ["benchmarks/beside", "--dry", "--shapes", "llama_1b", "--json", str(out)]
    (result,), shown = ran(command, out)
    assert result["failed"] == {}
    assert result["ours"]["losses"][0] > 3 and result["ours"]["mfu"] is None
    assert result["bare"]["losses"] == pytest.approx(result["ours"]["losses"], rel=1e-3)
    assert ("torch" in result) == ("torch is not installed" not in shown)


def test_the_contenders_of_the_tokenizing_benchmark_make_the_same_tokens(tmp_path):
    out = tmp_path / "tokenizing.json"
    size = ("--rounds", "1", "--megabytes", "0.3", "--vocab", "400")
    result, shown = ran(["benchmarks/tokenizing.py", *size, "--json", str(out)], out)
    assert result["ratio"]["encode_batch"] == 1
    assert set(result["ratio"]) == {
        "encode_batch",
        "encode_batch_fast",
        "prepare, 1 worker",
        "prepare, 2 workers",
    }
    assert "MB/s and core" in shown


def test_rows_of_single_options_are_merged_into_the_table_of_convergence(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    convergence = importlib.import_module("convergence")
    written = (ROOT / "docs/convergence.md").read_text()
    newest = f"| {convergence.OPTIONS[-1].name} |"
    lines = [line for line in written.splitlines() if not line.startswith(newest)]
    page = "\n".join([*lines, ""])
    first = next(at for at, line in enumerate(lines) if line.startswith("| option |"))
    heading = lines[first : first + 2]
    assert convergence.with_rows(page, heading) == page
    last, again = f"{newest} new |", "| 8-bit moments | again |"
    found = convergence.with_rows(page, [*heading, last, again]).splitlines()
    assert [line for line in found if line not in lines] == [again, last]
    assert [line for line in lines if line not in found] == [
        line for line in lines if line.startswith("| 8-bit moments |")
    ]


def test_a_step_above_its_bounds_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step_text = importlib.import_module("step_text")
    bounds = step_text.Bounds(moved=112, launches=800, hidden=0.8, temporaries=11.5)
    kept = step_text.StepText(112.0, 800, 11.5, 4.3, 180, 1.1, 19, hidden=0.8)
    assert bounds.broken_by(kept) == [] == bounds.broken_by(replace(kept, hidden=None))
    broken = replace(kept, moved=112.1, launches=801, temporaries=11.6, hidden=0.79)
    assert bounds.broken_by(broken) == [
        "moved: 112.1 is above 112",
        "launches: 801 is above 800",
        "temporaries: 11.6 is above 11.5",
        "hidden: 79% is below 80%",
    ]
    assert "hidden over data: 79%" in broken.lines()


def test_costs_of_linear_layers_are_of_the_layer_and_of_both_recurrences(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    linear_layers = importlib.import_module("linear_layers")
    row = linear_layers.layer_costs("conv", 16)
    assert row["us_per_token"] > 0 and row["kib_per_token"] > 0
    tokens = linear_layers.drawn_tokens("head", 16)
    state = jnp.zeros(linear_layers.STATE)
    both = (linear_layers.recur, linear_layers.by_tokens)
    chunks, single = (jax.jit(partial(way, corrects=True))(tokens, state) for way in both)
    for found, expected in zip(chunks, single, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_kernels_of_a_recurrence_that_need_more_than_their_share_are_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recurrence_text = importlib.import_module("recurrence_text")
    figures, bound = recurrence_text.Figures, recurrence_text.BOUND
    kept = figures(5.9, 199, 1.05)
    by = {"xla": figures(10.0, 1000, 1.0), "triton": kept, "mosaic": kept}
    assert recurrence_text.broken(by) == []
    by["triton"] = figures(6.1, 201, 1.2)
    by["mosaic"] = figures(5.9, 202, 1.0)
    assert recurrence_text.broken(by) == [
        f"triton, moved: 6.1 is above {bound.moved} of XLA's",
        f"triton, launches: 201 is above {bound.launches} of XLA's",
        f"triton, temporaries: 1.2 is above {bound.temporaries} of XLA's",
        f"mosaic, launches: 202 is above {bound.launches} of XLA's",
    ]
