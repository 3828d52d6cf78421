"""What docs/deterministic.md promises, in the text of a step compiled for an absent H100."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]
FLAGS = re.search(
    r"export XLA_FLAGS='(.*)'", (TESTS.parent / "docs" / "deterministic.md").read_text()
)[1]

STEP = """
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
import json
import jax, jax.numpy as jnp
import spmdtrain as st
from helpers import tiny
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import described_devices
from spmdtrain.train.step import make_step
devices = described_devices(hardware("h100"), 1)
setup = st.shard(tiny("precision.compute=bfloat16", "model.dropout=0.1", "model.layers=1"),
                 devices=devices)
with jax.sharding.use_abstract_mesh(setup.mesh.abstract_mesh):
    step = make_step(setup).lower(setup.state, setup.batch).compile().as_text()
here = jax.sharding.SingleDeviceSharding(devices[0])
shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=here)
          for shape, dtype in (((64, 32), "float32"), ((128,), "int32"), ((128, 32), "float32"))]
adds = jax.jit(lambda table, ids, rows: table.at[ids].add(rows)).lower(*shapes)
free = adds.compile(compiler_options={"xla_gpu_deterministic_ops": False}).as_text()
print(json.dumps({"step": step, "free": free}))
"""


def sums_in_any_order(text: str) -> list[str]:
    """The scatters of a program that may add two numbers to one place, in the order of arrival."""
    scatters = re.findall(r"= \S+ scatter\(.*", text)
    return [each for each in scatters if "unique_indices=true" not in each]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11) or not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="needs jax 0.11 and its CUDA plugin",
)
def test_a_step_with_the_flags_adds_in_one_order_and_chooses_no_matmul_by_time():
    environment = os.environ | {"XLA_FLAGS": FLAGS}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    step = found["step"]
    assert sums_in_any_order(found["free"]), "this is what the flags prevent"
    assert " scatter(" in step and not sums_in_any_order(step)
    matmuls = step.count('custom_call_target="__cublas$lt$matmul"')
    chosen = re.findall(r'"selected_algorithm":"?(-?\d+)', step)
    assert matmuls > 10 and chosen == ["0"] * matmuls
    assert "__triton_gemm" not in step
