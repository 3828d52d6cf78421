"""Attention to the parts of one array: the bits of attention to them apart, and near float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_attention import DEFAULTS
from test_mosaic import OLD, run

from pallas_kernels.attention import attention, joined, reference
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.joined import JOINED, joined_attention
from pallas_kernels.attention.problem import prepare
from pallas_kernels.bias import biased_heads, heads_apart
from pallas_kernels.calls import AttentionCall
from pallas_kernels.choose import Refused
from pallas_kernels.chosen import IN_PLACE, form_name, using

MOSAIC = "mosaic:interpret"
# Two queries to a key; a length and a head dim that are padded, in the segment of padding.
INTERPRETED = (Case(t=130, d=96, heads=(2, 1), segments="one"),)
SLOW = (
    Case(t=130, d=96, heads=(2, 1), causal=True, segments="three"),
    Case(b=2, t=256, heads=(2, 2), causal=True),
    Case(t=200, d=128, heads=(4, 2), causal=True, window=(40, 0)),
    Case(t=70, heads=(3, 1), softcap=15.0),
    Case(t=64, d=128, heads=(1, 1), segments="short"),
    Case(t=190, d=192, heads=(2, 1), causal=True, dtype="float16"),
    Case(t=300, d=256, heads=(1, 1), window=(64, 32)),
    Case(t=1, heads=(2, 1), causal=True),
)
CASES = INTERPRETED + SLOW


def arrays(case):
    """(products, bias, the gradient of out)"""
    heads, kv_heads = case.heads
    slots = (kv_heads, heads // kv_heads + 2, case.d)
    random = np.random.default_rng(0)
    products = random.standard_normal((case.b, case.t, *slots))
    dout = random.standard_normal((case.b, case.t, heads, case.d))
    bias = 0.3 * random.standard_normal(slots)
    return jnp.asarray(products, case.dtype), jnp.asarray(bias, "float32"), jnp.asarray(dout)


def options(case):
    """The options of the case, with one array of segment ids."""
    chosen = case.options()
    if "segment_ids" in chosen:
        chosen["segment_ids"] = chosen["segment_ids"][0]
    return chosen


def flat(parts):
    return (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in parts)


def in_place(case, implementation):
    return lambda products, bias: joined_attention(
        products, bias, implementation=implementation, **options(case)
    )


def apart(case, implementation):
    def call(products, bias):
        parts = flat(biased_heads(products, bias, implementation="xla"))
        return attention(*parts, implementation=implementation, **options(case))

    return call


def definition(case):
    def call(products, bias):
        parts = flat(heads_apart((products + bias).astype(products.dtype)))
        return reference.attend(*prepare(*parts, **(DEFAULTS | options(case))))[0]

    return call


def with_gradients(call):
    def both(products, bias, dout):
        out, pull = jax.vjp(call, products, bias)
        return out, *pull(dout.astype(out.dtype))

    return both


def results(form, case, implementation):
    return jax.jit(with_gradients(form(case, implementation)))(*arrays(case))


def compare(case, implementation):
    """In place gives what float64 gives, up to rounding. Returns it."""
    drawn = arrays(case)
    got = results(in_place, case, implementation)
    exact = oracle.in_float64(with_gradients(definition(case)), *drawn)
    plain = jax.jit(with_gradients(definition(case)))(*drawn)
    factor = 3.0 if case.softcap else 2.0
    names = "out", "gradient", "bias"
    for name, ours, rounded, true in zip(names, got, plain, exact, strict=True):
        oracle.check(name, ours, rounded, true, case.dtype, oracle.GRADIENT, factor)
    return got


def compare_both(case, implementation):
    """And the bits that the parts give, but for the sum for the bias."""
    got = compare(case, implementation)
    same = results(apart, case, implementation)
    for name, ours, theirs in zip(("out", "gradient"), got, same, strict=False):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=name)


CHILD = """
import sys
from test_joined_attention import CASES, MOSAIC, compare_both
for case in CASES:
    if case.name in sys.argv[1:]:
        compare_both(case, MOSAIC)
"""


def interpret(*chosen, seconds):
    done = run(CHILD, *(case.name for case in chosen), seconds=seconds)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
def test_it_reads_and_writes_in_place():
    interpret(*INTERPRETED, seconds=300)


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="needs jax 0.11 or later")
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_more_of_it_in_place(case):
    interpret(case, seconds=600)


@pytest.mark.parametrize("has_bias", [True, False])
def test_what_cannot_read_it_gets_the_parts(has_bias):
    case = Case(t=9, d=8, heads=(4, 2), causal=True, segments="three", dtype="float32")
    products, bias, dout = arrays(case)
    without = () if has_bias else (jnp.zeros_like(bias),)
    got = jax.jit(
        with_gradients(
            lambda x, b: joined_attention(
                x, b if has_bias else None, implementation="xla", **options(case)
            )
        )
    )(products, bias, dout)
    want = jax.jit(with_gradients(apart(case, "xla")))(products, *(without or (bias,)), dout)
    for ours, theirs in list(zip(got, want, strict=True))[: 2 + has_bias]:
        np.testing.assert_array_equal(ours, theirs)


def test_a_call_reads_in_place_where_a_kernel_is_named_or_that_is_chosen(monkeypatch):
    case = Case(t=8, d=8, dtype="float32")
    products, bias, _ = arrays(case)
    taken = []

    def attend(_problem, name, *_):
        taken.append(name)
        return jnp.zeros(())

    monkeypatch.setattr(joined, "_attend", attend)
    monkeypatch.setattr(joined, "READERS", ("xla",))
    joined_attention(products, bias, implementation="xla")
    assert taken == ["xla"]
    with using({}) as decisions:
        joined_attention(products, bias)
    assert taken == ["xla"], "it was not asked for"
    [call] = (each for each in decisions.calls.values() if isinstance(each, AttentionCall))
    with using({form_name(call, JOINED): IN_PLACE}):
        joined_attention(products, bias)
    assert taken == ["xla", "xla"]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="slots"):
        joined_attention(jnp.ones((1, 2, 3, 2, 8)), jnp.ones((3, 2, 8)))
    with pytest.raises(ValueError, match=re.escape("bias (3, 8)")):
        joined_attention(jnp.ones((1, 2, 3, 3, 8)), jnp.ones((3, 8)))
    with pytest.raises(Refused, match="bfloat16 and float16"):
        joined_attention(jnp.ones((1, 2, 3, 3, 8)), implementation="mosaic")
