"""`spmdtrain tune`, and what `train` does of it before it opens a GPU."""

import argparse
import json
import sys
from dataclasses import replace

import pytest
from helpers import tiny

from pallas_kernels.calls import AttentionCall, NormCall
from pallas_kernels.tuning import Table
from pallas_kernels.tuning.work import share_of_sheet
from spmdtrain.cli import devices, main
from spmdtrain.cli.machine import kernels, tune
from spmdtrain.cli.run import train
from spmdtrain.config import load

CONFIG = """
[model]
layers = 1
embed = 16
heads = 1
vocab = 32
[train]
sequence_length = 8
global_batch = 1
steps = 1
[data]
corpus = "synthetic"
"""
CALL = AttentionCall(
    dtype="bfloat16",
    batch=2,
    queries=4096,
    keys=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    value_dim=128,
    left=None,
    right=0,
    softcap=None,
    scale=0.1,
    segments=False,
    positions=False,
    bias=False,
    lse=False,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.seconds
def test_the_table_is_shown_exported_and_known_from_then_on(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG, encoding="utf-8")
    exported = tmp_path / "table.json"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["tune", str(path), "--export", str(exported)]) == 0
    printed = capsys.readouterr().out
    assert "attention float32 1x8x1x16 causal\n  * xla                the only one" in printed
    assert "needs an NVIDIA GPU, this is cpu" in printed
    written = json.loads(exported.read_text(encoding="utf-8"))["gpus"]["cpu"]
    assert {entry["implementation"] for entry in written.values()} == {"xla"}
    config = tiny().model_validate(load(str(path)).model_dump())
    assert Table().program(kernels.program(config, 1))["calls"] == sorted(written)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 9})})
    assert kernels.program(longer, 1) == kernels.program(config, 1) != kernels.program(config, 2)


@pytest.mark.parametrize(
    ("settings", "driver", "simulated", "known", "asked"),
    [
        ((), True, None, False, ["--devices", "1", "--json"]),
        ((), True, None, True, None),
        (("kernels.tune=again",), True, None, True, ["--devices", "1", "--json", "--again"]),
        (("kernels.tune=off",), True, None, False, None),
        ((), False, None, False, None),
        ((), True, 8, False, None),
    ],
)
def test_a_run_measures_what_its_machine_does_not_know(
    settings, driver, simulated, known, asked, monkeypatch
):
    config = tiny(*settings)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: driver)
    commands = []
    monkeypatch.setattr(kernels, "_run", commands.append)
    if known:
        entry = {"implementation": "xla"}
        Table().add("G", {"one": entry}, {kernels.program(config, 1): ["one"]})
    parsed = argparse.Namespace(config="c.toml", set=[], simulate_devices=simulated)
    train._measure_kernels(parsed, config)
    assert [command[5:] for command in commands] == ([] if asked is None else [asked])


def test_a_failure_to_measure_costs_a_line(capfd, monkeypatch):
    kernels._run([sys.executable, "-c", "raise SystemExit(3)"])
    assert "kernels: not measured: it ended with code 3" in capfd.readouterr().err
    monkeypatch.setattr(kernels, "MOST_SECONDS", 0.2)
    kernels._run([sys.executable, "-c", "import time; time.sleep(100)"])
    assert "kernels: not measured: it took more than 0 s" in capfd.readouterr().err


def test_times_stand_against_the_data_sheet():
    flops = 3.5 * 4 * 2 * 32 * 128 * 4096**2 / 2
    h100 = "NVIDIA H100 80GB HBM3"
    assert share_of_sheet(h100, CALL, flops / 989.4e12) == pytest.approx(1)
    windowed = replace(CALL, left=0)  # each query sees its own key
    pairs = 3.5 * 4 * 2 * 32 * 128 * 4096
    assert share_of_sheet(h100, windowed, pairs / 989.4e12) == pytest.approx(1)
    assert share_of_sheet("Unknown", CALL, 1.0) is None
    norm = NormCall(
        op="rmsnorm",
        rows=100,
        width=10,
        dtype="bfloat16",
        scale="float32",
        bias=None,
        residual=None,
    )
    assert share_of_sheet(h100, norm, 100 * 10 * 2 * 5 / 3352e9) == pytest.approx(1)


def test_the_table_for_a_person(cache):
    entry = {
        "implementation": "mosaic",
        "milliseconds": {"xla": 9.0, "mosaic": 1.0},
        "faults": {"triton": "out is wrong"},
        "refused": {"cudnn": "no softcap"},
        "remark": "",
    }
    shown = tune.describe("NVIDIA H200", Table(cache), [(CALL, entry)]).splitlines()
    assert shown[3] == "attention bfloat16 2x4096x32:8x128 causal"
    assert shown[4].split()[:3] == ["*", "mosaic", "1.000"] and "% of the data sheet" in shown[4]
    assert shown[5].split()[0] == "xla"
    assert shown[6:] == [
        "    triton             not used: out is wrong",
        "    cudnn              refuses: no softcap",
    ]
