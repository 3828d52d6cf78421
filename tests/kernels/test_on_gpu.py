"""Every implementation on the GPU that is there, on all cases that it runs: make test-gpu."""

import jax
import numpy as np
import pytest
import test_attention as of_attention
import test_bias as of_bias
import test_chunk_scan as of_chunk_scan
import test_grouped as of_grouped
import test_inverse as of_inverse
import test_joined_attention as of_joined
import test_linear_cross_entropy as of_loss
import test_norms as of_norms

from pallas_kernels.attention import cases as attention_cases
from pallas_kernels.attention.api import IMPLEMENTATIONS, attention
from pallas_kernels.choose import Refused
from pallas_kernels.grouped import cases as grouped_cases
from pallas_kernels.inverse import cases as inverse_cases
from pallas_kernels.loss import cases as loss_cases
from pallas_kernels.norm import cases as norm_cases
from pallas_kernels.recurrence import cases as recurrence_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_matmuls():
    """What these tests compare in float32 is float32: a GPU multiplies it in TF32 unless asked."""
    with jax.default_matmul_precision("highest"):
        yield


def of(cases):
    """Those of CI and for Hopper first: `-m "gpu and core"` runs them alone."""
    first = dict.fromkeys((*cases.CI, *getattr(cases, "HOPPER", ())))
    core = [pytest.param(case, id=case.name, marks=pytest.mark.core) for case in first]
    others = [case for case in dict.fromkeys(cases.SLOW) if case not in first]
    return [*core, *(pytest.param(case, id=case.name) for case in others)]


def unless_refused(compare, case, implementation):
    try:
        compare(case, implementation)
    except Refused as refused:
        pytest.skip(refused.reason)


# A case's one after the other: they share its answers.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", of(attention_cases))
def test_attention(implementation, case, monkeypatch):
    if implementation == "cudnn":  # it gives no lse: that and its gradient come from another
        monkeypatch.setattr(of_attention, "kernel", with_lse_of_xla)
    unless_refused(of_attention.compare, case, implementation)


def with_lse_of_xla(options, implementation):
    def run(q, k, v, bias):
        out = attention(q, k, v, bias=bias, implementation=implementation, **options)
        return out, attention(q, k, v, bias=bias, return_lse=True, implementation="xla", **options)[
            1
        ]

    return run


@pytest.mark.core
@pytest.mark.parametrize("case", of_joined.CASES, ids=lambda case: case.name)
def test_attention_in_place(case):
    unless_refused(of_joined.compare, case, "mosaic")


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("case", of(norm_cases))
def test_norms(implementation, case):
    unless_refused(of_norms.compare, case, implementation)


@pytest.mark.parametrize("implementation", ["xla", "triton", "mosaic"])
@pytest.mark.parametrize("case", of(grouped_cases))
def test_grouped(implementation, case):
    unless_refused(of_grouped.compare, case, implementation)


@pytest.mark.parametrize(
    "implementation", ["xla", "triton", "triton/narrow", "triton/wide", "mosaic"]
)
@pytest.mark.parametrize("case", of(recurrence_cases))
def test_chunk_scan(implementation, case):
    unless_refused(of_chunk_scan.compare, case, implementation)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("case", of(inverse_cases))
def test_inverse(implementation, case):
    unless_refused(of_inverse.compare, case, implementation)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["xla", "triton", "triton/fourfold"])
@pytest.mark.parametrize("case", loss_cases.CI, ids=lambda case: case.name)
def test_loss(implementation, case):
    unless_refused(of_loss.compare, case, implementation)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases(implementation, dtype):
    of_bias.compare_heads((4, 300, 3, 4, 64), dtype, implementation)
    of_bias.compare_gelu((4, 300, 1000), dtype, implementation)


@pytest.mark.parametrize("implementation", ["mosaic", "triton", "cudnn"])
def test_twenty_runs_give_the_same_bits(implementation):
    case = attention_cases.Case(b=4, t=2048, heads=(8, 2), d=128, causal=True)
    drawn = case.draw()

    @jax.jit
    def run(q, k, v, dout):
        out, pull = jax.vjp(
            lambda *qkv: attention(*qkv, causal=True, implementation=implementation), q, k, v
        )
        return out, pull(dout)

    arrays = [drawn[name] for name in ("q", "k", "v", "dout")]
    try:
        first = jax.device_get(run(*arrays))
    except Refused as refused:
        pytest.skip(refused.reason)
    for _ in range(19):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(*arrays)), first)
