"""Compiles programs for GPUs that are not there, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

# Without a GPU to time on, XLA compiles each fusion once more to see that it may keep its first
# choice of how many numbers a thread computes: a third of the time. Nothing else in the text
# differs without.
UNTUNED = "--xla_gpu_autotune_level=0"

STEP = """
import sys
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
from helpers import tiny
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import executable
gpu, *settings = sys.argv[1:]
config = tiny(*settings)
print(executable(config, dict(config.mesh.sizes), hardware(gpu))[0].as_text())
"""

TESTS = Path(__file__).parent

needs_compiler = pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="needs jax 0.11, its CUDA plugin and its compiler",
)


def printed(program: str, *arguments: str, folders: Sequence[str] = (), flags: str = "") -> str:
    """What a Python program prints that compiles for absent GPUs and reads the text.

    It imports from tests/ and from these `folders` of it. XLA's flags are `flags` and ours, not
    those of this process, which are for CPUs.
    """
    paths = [TESTS.parent, TESTS, *(TESTS / folder for folder in folders)]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "XLA_FLAGS": f"{UNTUNED} {flags}".strip(),
    }
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def compiled_text(gpu: str, *settings: str, flags: str = "") -> str:
    """The text that XLA compiles of the step of `tiny(*settings)`; `flags` come before ours."""
    return printed(STEP, gpu, *settings, flags=flags)
