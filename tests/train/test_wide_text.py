"""The step as XLA compiles it for H100: nothing of 16 bits adds up long sums in 16 bits."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import pytest

# What may add in 16 bits, with the reason.
ALLOWED = {
    # Matrix units accumulate in float32, and round the result once.
    "dot",
    # Of activations over `tensor`: as many terms as devices, and 32 bits would be twice the bytes.
    "all-reduce",
}
ADDING = ("dot", "reduce", "reduce-window", "scatter", "select-and-scatter", "all-reduce")
ADDING += ("reduce-scatter", "convolution")
INSTRUCTION = re.compile(r"= \(?(?:bf16|f16)\[[^=]*? (?P<kind>[a-z-]+?)(?:-start|-done)?\(")

# Compiled in a process of its own: XLA's flags for GPUs are not those of these tests.
TEXT = """
import sys
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
from helpers import tiny
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import executable
config = tiny(*sys.argv[1:])
print(executable(config, dict(config.mesh.sizes), hardware("h100"))[0].as_text())
"""
# The sums of a GPT: tables of tokens and positions, tied to the head, and biases.
GPT = ("precision.compute=bfloat16", "model.embed=128", "model.vocab=512")
LAYOUTS = {
    "one device": (),
    "data 2 tensor 2": ("mesh.data=2", "mesh.tensor=2"),
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11) or not importlib.util.find_spec("jax_cuda13_plugin"),
        reason="needs jax's CUDA plugin and its compiler",
    ),
]


@cache
def text_of(layout: str) -> str:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", TEXT, *GPT, *LAYOUTS[layout]],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def kinds_of(text: str) -> set[str]:
    """The kinds of operations in a text whose result has 16 bits and adds something up."""
    kinds = {match["kind"] for match in INSTRUCTION.finditer(text)}
    return kinds & set(ADDING)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_long_sum_has_16_bits_on_a_gpu(layout):
    text = text_of(layout)
    assert text.count("bf16[") > 100  # it does compute in 16 bits
    assert kinds_of(text) <= ALLOWED


def test_only_activations_cross_devices_in_16_bits():
    """Three dims: sequences, tokens, width. Gradients of weights have fewer, and float32."""
    text = text_of("data 2 tensor 2")
    shapes = re.findall(r"= bf16\[([\d,]*)\]\S* all-reduce", text)
    assert shapes and all(shape.count(",") == 2 for shape in shapes)


def test_the_sums_of_a_lookup_and_of_a_bias_would_be_seen():
    lines = (
        "  %a = bf16[512,128]{1,0} scatter(%p0, %p1, %p2), to_apply=%add",
        "  ROOT %b = bf16[128]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add",
    )
    assert kinds_of("\n".join(lines)) == {"scatter", "reduce"}
