"""The table of GPUs: a new chip is one entry, and everyone who asks knows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import gpus
from spmdtrain.planner.cost.hardware import BOXES, DEVICES

ROOT = Path(__file__).parents[2]

# In a process of its own, which adds the chip before anything else has read the table.
NEW_CHIP = """
import contextlib, io, json
from dataclasses import replace
from pallas_kernels import gpus

gpus.GPUS["z900"] = replace(
    gpus.GPUS["h200"],
    name="z900",
    device_kinds=("Zeta Z900",),
    bfloat16=4e15,
    memory=3e11,
    cores=200,
)

import jax
from pallas_kernels import choose
from pallas_kernels.backends import mosaic
from spmdtrain.cli import main
from spmdtrain.planner import deviceless
from spmdtrain.planner.cost.hardware import NAME_OF_DEVICE_KIND, hardware
from spmdtrain.running.report.metrics import peak_flops

for module in (choose, mosaic):
    module.device_kind = lambda: "Zeta Z900"
jax.__version_info__ = (0, 12, 0)

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    command = "estimate configs/gpt2_124m.toml --hardware z900 --set mesh.data=8 --json"
    code = main(command.split())
helped = io.StringIO()
with contextlib.redirect_stdout(helped), contextlib.suppress(SystemExit):
    main(["estimate", "--help"])
print(json.dumps({
    "peak of training": peak_flops("Zeta Z900"),
    "estimate": [code, json.loads(printed.getvalue())],
    "help": "z900" in helped.getvalue(),
    "its name": NAME_OF_DEVICE_KIND["Zeta Z900"],
    "its box": hardware("z900").per_host,
    "XLA": "core_count: 200" in deviceless.target(hardware("z900")),
    "kernels": [choose.no_gpu(False), mosaic.refusal(False)],
}))
"""


@pytest.mark.seconds
def test_a_new_chip_is_one_entry():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", NEW_CHIP],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    code, estimate = found.pop("estimate")
    assert code == 0 and estimate["hardware"] == "z900"
    assert 1e12 * estimate["model_tflops_per_device"] / estimate["mfu"] == pytest.approx(4e15)
    assert found == {
        "peak of training": 4e15,
        "help": True,
        "its name": "z900",
        "its box": 8,
        "XLA": True,
        "kernels": ["", ""],
    }


def test_the_planner_the_help_and_the_docs_have_the_names_of_the_table():
    assert list(DEVICES) == list(gpus.GPUS) and set(BOXES) <= set(gpus.GPUS)
    assert ", ".join(gpus.GPUS) in (ROOT / "docs/planner.md").read_text()


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("NVIDIA A100-SXM4-80GB", "ampere"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),  # not listed
        ("NVIDIA GB200", "blackwell"),
        ("NVIDIA B300", "blackwell"),  # not listed
        ("Tesla T4", gpus.BEFORE_AMPERE),
        ("NVIDIA L4", "ada"),  # not listed
        ("NVIDIA GeForce RTX 4070 Ti", "ada"),  # not listed
        ("NVIDIA RTX 6000 Ada Generation", "ada"),
        ("NVIDIA GeForce RTX 5090", "blackwell rtx"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "blackwell rtx"),  # not listed
        ("cpu", ""),
    ],
)
def test_generations(kind, generation):
    assert gpus.generation(kind) == generation


def test_a_listed_chip_is_of_the_generation_that_its_compute_capability_says():
    for gpu in gpus.GPUS.values():
        if gpu.compute_capability is not None:
            of_capability = {
                **{(8, 0): "ampere", (8, 9): "ada", (9, 0): "hopper"},
                **{(10, 0): "blackwell", (12, 0): "blackwell rtx"},
            }
            assert gpu.generation == of_capability[gpu.compute_capability]


def test_peaks_are_dense_and_sum_in_float32():
    """Each halving of the numbers doubles the rate of every tensor core; a data sheet's figure with
    sparsity, or GeForce's with sums in 16 bits, is twice as much.
    """
    for gpu in gpus.GPUS.values():
        assert gpu.bfloat16 == pytest.approx(2 * gpu.float32, rel=0.02), gpu.name
        if gpu.float8:
            assert gpu.float8 == pytest.approx(2 * gpu.bfloat16, rel=0.02), gpu.name
        if gpu.compute_capability is not None:
            cycles = gpu.bfloat16 / gpu.cores / 1.2e9  # FLOPs of a core, at less than any clock
            widest = {"ada": 2300, "blackwell rtx": 2300}.get(gpu.generation, 15000)
            assert 900 < cycles < widest, gpu.name
