"""`spmdtrain doctor`: it names what is wrong and what to type, and nothing on a machine that is
well.
"""

import copy
import json

import jax
import pytest

from spmdtrain.cli import main
from spmdtrain.cli.machine import measured
from spmdtrain.cli.machine.problems import problems

WELL = {
    "versions": {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"},
    "cuda": {
        "jax-cuda13-plugin": "0.12.0.1",
        "jax-cuda13-pjrt": "0.12.0.1",
        "nvidia-nccl-cu13": "2.28",
    },
    "driver": "NVRM version: NVIDIA UNIX 580.1",
    "has_driver": True,
    "devices": {"NVIDIA H100": 8},
    "platform": "gpu",
    "device_memory": 60_000_000_000,
    "failure": "",
    "said_by_jax": [],
    "environment": {},
    "open_files": 65536,
    "disk_free": 1e12,
}


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (
            {"versions": {"jax": "0.9.1", "jaxlib": "0.9.1"}, "cuda": {"nccl": ""}},
            "jax 0.9.1 is not",
            "jax>=0.10,<0.13",
        ),
        (
            {"versions": {"jax": "0.12.0", "jaxlib": "0.11.2"}},
            "do not belong together",
            "jaxlib==0.12.0",
        ),
        (
            {"cuda": WELL["cuda"] | {"jax-cuda13-pjrt": "0.11.0"}},
            "does not match jax",
            "jax-cuda13-pjrt==0.12.0.1",
        ),
        ({"platform": "cpu", "cuda": {}}, "no CUDA plugin", "spmdtrain[cuda13]"),
        ({"platform": "cpu", "said_by_jax": ["no cuDNN"]}, "uses the CPU: no cuDNN", "nvidia-smi"),
        (
            {"environment": {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}},
            "comes before",
            "unset LD_LIBRARY_PATH",
        ),
        ({"environment": {"JAX_ENABLE_X64": "1"}}, "64-bit", "unset JAX_ENABLE_X64"),
        (
            {"cuda": {name: each for name, each in WELL["cuda"].items() if "nccl" not in name}},
            "NCCL",
            "nvidia-nccl",
        ),
        ({"open_files": 256}, "only 256 files", "ulimit -n"),
        ({"disk_free": 1e9}, "1.0 GB free", "--run"),
        ({"failure": "Unable to initialize backend 'cuda'"}, "no device: Unable", "JAX_PLATFORMS="),
    ],
)
def test_each_fault_is_named_with_its_cure(changes, what, fix):
    ((found, cure),) = problems(WELL | changes)
    assert what in found and fix in cure


@pytest.mark.parametrize(
    "changes", [{}, {"platform": "cpu", "environment": {"JAX_PLATFORMS": "cpu"}}]
)
def test_a_machine_that_is_well_has_no_faults(changes):
    assert problems(WELL | changes) == []


def test_the_command_shows_this_machine(capsys, monkeypatch):
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    code = main(["doctor"])
    printed = capsys.readouterr().out
    assert "devices      8 x cpu" in printed and "jaxlib" in printed and "XLA flags" in printed
    assert ("nothing is wrong" in printed) == (code == 0)
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert main(["doctor", "--json"]) == 4
    assert "JAX_ENABLE_X64" in " ".join(json.loads(capsys.readouterr().out)["problems"])


# --measure


def device(number):
    return {
        "device": number,
        "kind": "NVIDIA H100 80GB HBM3",
        "matmul": 700e12,
        "copy": 3e12,
        "to_device": 50e9,
        "from_device": 50e9,
    }


FAST = {
    "devices": [device(number) for number in range(4)],
    "pairs": [{"from": a, "to": b, "rate": 200e9} for a in range(4) for b in range(a + 1, 4)],
    "ring": {"rate": 150e9, "seconds": 4e-6},
    "disk": {"write": 2e9, "read": 3e9},
    "gradients": {"holds": True, "said": "16 leaves, worst: norm is 0.60% off, 2.00% allowed"},
}


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("devices", 2, "matmul"), 610e12, "device 2: bfloat16 matmul 610 TFLOP/s, 87% of the med"),
        (("devices", 1, "copy"), 2.6e12, "device 1: copy in memory 2600 GB/s, 87% of the median"),
        (("devices", 0, "from_device"), 20e9, "device 0: copy to the host 20 GB/s, 40%"),
        (("pairs", 5, "rate"), 50e9, "devices 2 and 3: 50 GB/s, 25% of the median of all pairs"),
        (("disk", "write"), 50e6, "the disk here: write 0.05 GB/s"),
        (("gradients", "holds"), False, "a step in bfloat16 is not that of float32: 16 leav"),
    ],
)
def test_what_is_slower_than_its_like_is_named(where, value, said):
    assert [*measured.slow(FAST)] == []
    found = copy.deepcopy(FAST)
    *path, last = where
    inner = found
    for key in path:
        inner = inner[key]
    inner[last] = value
    ((what, fix),) = measured.slow(found)
    assert what.startswith(said) and fix


def test_devices_that_are_all_below_their_data_sheet_are_named():
    found = copy.deepcopy(FAST)
    for each in found["devices"]:
        each["matmul"] = 500e12
    assert len([*measured.slow(found)]) == 4
    what, _ = next(measured.slow(found))
    assert "51% of the data sheet of NVIDIA H100" in what


def test_the_measured_figures_are_shown_and_judged(capsys, monkeypatch):
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    found = copy.deepcopy(FAST)
    found["disk"]["read"] = 1e6
    monkeypatch.setattr(measured, "measure", lambda: found)
    assert main(["doctor", "--measure"]) == 4
    printed = capsys.readouterr().out
    assert "device 3     bfloat16 matmul 700 TFLOP/s (71% of the data sheet)" in printed
    assert "pairs        6, from 200 GB/s to 200 GB/s" in printed
    assert "bfloat16     gradients: 16 leaves, worst: norm is 0.60% off" in printed
    assert "wrong: the disk here: read 0.001 GB/s; try --run on another disk" in printed
    assert main(["doctor", "--measure", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["measured"] == found


@pytest.mark.long
def test_this_machine_is_measured(tmp_path, monkeypatch):
    """With the long parts replaced: calibrate has tests of its own."""
    monkeypatch.setattr("spmdtrain.planner.calibrate.matmul_rate", lambda _: 1e12)
    monkeypatch.setattr("spmdtrain.planner.calibrate.copy_rate", lambda: 1e9)
    monkeypatch.setattr("spmdtrain.planner.calibrate.ring", lambda: (2e9, 1e-6))
    monkeypatch.setattr(measured, "DISK_BYTES", 2**23)
    found = measured.measure(str(tmp_path))
    assert [each["device"] for each in found["devices"]] == [each.id for each in jax.devices()]
    assert all(each["to_device"] > 0 and each["from_device"] > 0 for each in found["devices"])
    assert found["disk"]["write"] > 0 and found["disk"]["read"] > 0
    assert found["ring"] == {"rate": 2e9, "seconds": 1e-6} and [*tmp_path.iterdir()] == []
    assert found["gradients"]["holds"]
    assert len(measured.describe(found)) == len(jax.devices()) + 3
    found["devices"][0]["to_device"] = 1.0
    found["disk"] = FAST["disk"]
    assert [*measured.slow(found)] == [], "simulated devices share the cores of the host"
