"""Compiles a tiny step for a GPU that is not there, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

# XLA's flags for GPUs are not those of these tests.
PROGRAM = """
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

needs_compiler = pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="needs jax's CUDA plugin and its compiler",
)


def compiled_text(gpu: str, *settings: str, flags: str = "") -> str:
    """The text that XLA compiles of the step of `tiny(*settings)`; `flags` come before ours."""
    tests = str(Path(__file__).parent)
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, gpu, *settings],
        env=environment | ({"XLA_FLAGS": flags} if flags else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout
