"""The step as XLA compiles it for H100: nothing of 16 bits adds up long sums in 16 bits."""

import re
from functools import cache

import pytest
from absent_gpu import compiled_text, needs_compiler

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

# The sums of a GPT: tables of tokens and positions, tied to the head, and biases.
GPT = ("precision.compute=bfloat16", "model.embed=128", "model.vocab=512")
LAYOUTS = {
    "one device": (),
    "data 2 tensor 2": ("mesh.data=2", "mesh.tensor=2"),
}

pytestmark = [pytest.mark.long, needs_compiler]


@cache
def text_of(layout: str) -> str:
    return compiled_text("h100", *GPT, *LAYOUTS[layout])


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
