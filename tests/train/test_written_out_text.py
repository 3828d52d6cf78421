"""The step of a GPT as XLA compiles it for one H200, which writes the layers out."""

import re
from collections import Counter
from functools import cache

import pytest
from absent_gpu import compiled_text, needs_compiler

from spmdtrain.compiled import hlo
from spmdtrain.compiled.kernel_launches import Kernel, kernels

LAYERS, SEQUENCES, TIME, EMBED = 3, 2, 128, 128
FFN, QKV = 4 * EMBED, 3 * EMBED
GPT = (
    *(f"model.layers={LAYERS}", f"model.embed={EMBED}", "model.vocab=1024"),
    *(f"train.global_batch={SEQUENCES}", f"train.sequence_length={TIME}"),
    *("precision.compute=bfloat16", "model.heads=2", "model.attention=mosaic"),
)
# Without a GPU nothing can be autotuned, and XLA would take its own matmuls, which it fuses less.
CUBLAS = "--xla_gpu_enable_triton_gemm=false"
MATMUL = "__cublas$lt$matmul"

pytestmark = [pytest.mark.long, needs_compiler]


@cache
def text() -> str:
    return compiled_text("h200", *GPT, flags=CUBLAS)


@cache
def computations() -> dict[str, list[hlo.Instruction]]:
    return hlo.computations(text())[0]


@cache
def instructions() -> dict[str, hlo.Instruction]:
    return {each.name: each for listed in computations().values() for each in listed}


@cache
def launched() -> list[Kernel]:
    return kernels(text())


def beside_matmuls(part: str) -> list[Kernel]:
    """The kernels of a part of a layer that are no matmul."""

    def computes(kernel: Kernel) -> bool:
        call = instructions()[kernel.name]
        inner = [each for name in call.called for each in computations()[name]]
        is_matmul = any(MATMUL in each.line for each in (call, *inner))
        return re.search(rf'op_name="[^"]*/{part}/', call.line) is not None and not is_matmul

    return [each for each in launched() if computes(each)]


def test_no_kernel_is_launched_by_a_loop():
    assert len(launched()) > 50 * LAYERS
    assert [each.name for each in launched() if each.launches > 1] == []


def test_gelu_is_computed_by_its_matmul_and_again_in_the_backward_pass():
    """Its parts would be arrays as wide as the mlp, if they were kept from the forward pass.

    One kernel of the backward pass reads gelu's input and the gradient, and writes a gradient and
    the sum of it for the bias.
    """
    epilogues = Counter(re.findall(r'"epilogue":"(\w+)"', text()))
    assert epilogues["BIAS_GELU_AUX"] == LAYERS
    wide = 2 * SEQUENCES * TIME * FFN  # bytes
    moved = sum(each.moved for each in beside_matmuls("mlp"))
    assert 3 * LAYERS * wide < moved < 4 * LAYERS * wide


def test_the_gradient_of_the_stream_is_added_by_the_norms():
    """They read it beside their own, and nothing else adds it."""
    stream = 2 * SEQUENCES * TIME * EMBED  # bytes
    moved = sum(each.moved for each in beside_matmuls("norm"))
    # Each of two norms moves x and y forward; x, dy, the stream's gradient and dx backward.
    assert 12 * LAYERS * stream < moved < 14 * LAYERS * stream
    added = [
        each
        for part in ("attention", "mlp")
        for each in beside_matmuls(part)
        if "add" in each.name and each.moved > stream
    ]
    assert added == []


def test_attention_reads_queries_keys_and_values_where_their_matmul_puts_them():
    """And writes their gradients there, and the sums for their bias."""
    of_attention = beside_matmuls("attention")
    assert [each.name for each in of_attention if each.only_moves] == []
    mosaic = [each for each in of_attention if each.kind == "mosaic_gpu_v2"]
    assert len(mosaic) == 3 * LAYERS
    token = 2 * SEQUENCES * TIME  # bytes of one channel
    read = sum(each.read for each in mosaic)
    written = sum(each.written for each in mosaic)
    # Forward, dq, and dk and dv read all of them; the latter two the gradient of out as well.
    assert read >= LAYERS * token * (3 * QKV + 2 * EMBED)
    assert read + written < 1.1 * LAYERS * token * (4 * QKV + 3 * EMBED)
    others = sum(each.moved for each in of_attention) - read - written
    assert others < LAYERS * token * 6 * EMBED  # of out: its delta, and the gradient of its bias


def test_the_bias_of_queries_keys_and_values_is_a_vector():
    """As a matrix it would be written out for every token, and read by the matmul."""
    of_qkv = re.compile(rf"\(?bf16\[{SEQUENCES * TIME},{QKV}\]")
    matmuls = [
        each
        for each in instructions().values()
        if MATMUL in each.line and of_qkv.match(each.type) and "/jvp()/" in each.line
    ]
    assert len(matmuls) == LAYERS
    assert all('"beta":0' in each.line and '"epilogue":"BIAS"' in each.line for each in matmuls)
