"""`spmdtrain doctor`: it names what is wrong and what to type, and nothing on a machine that is
well.
"""

import json

import pytest

from spmdtrain.cli import main
from spmdtrain.cli.doctor import problems

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
