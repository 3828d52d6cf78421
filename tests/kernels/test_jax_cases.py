"""The cases of jax's own attention and norm tests, asked of ours: they must mean the same.

Attention answers to jax.nn.dot_product_attention in float32, norms to their formula in float64, by
the rule of oracle.py, which is stricter than jax's. "ops: X" stands for
tests/pallas/gpu_ops_test.py and "nn: X" for tests/nn_test.py of the jax repository.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels import norm
from pallas_kernels.attention import attention, reference, tiling, xla
from pallas_kernels.attention.problem import prepare
from pallas_kernels.attention.tiling import Tile

pytestmark = pytest.mark.long

WHOLE = (128, 128)  # a tile of queries and keys


@dataclass(frozen=True, kw_only=True)
class Case:
    batch: int = 2
    time: int = 128
    heads: tuple[int, int] = (4, 4)  # of queries, of keys and values
    d: int = 32
    dtype: str = "float16"
    causal: bool = False
    halves: bool = False  # two documents in a row
    lengths: bool = False  # of queries and of keys, of each sequence
    tril: bool = False  # a mask array
    bias: int | None = None  # its batch
    window: tuple[int, int] | None = None
    vmap: bool = False
    dout_ones: bool = False
    forward: tuple[int, int] = WHOLE
    dq: tuple[int, int] = WHOLE
    dkv: tuple[int, int] = WHOLE

    def arrays(self) -> list[jax.Array | None]:
        """q, k, v, bias, dout"""
        random, (h, k) = np.random.default_rng(0), self.heads
        draw = lambda *shape: jnp.asarray(random.standard_normal(shape), self.dtype)  # noqa: E731
        q, dout = (draw(self.batch, self.time, h, self.d) for _ in range(2))
        k, v = (draw(self.batch, self.time, k, self.d) for _ in range(2))
        bias = None if self.bias is None else draw(self.bias, h, self.time, self.time)
        return [q, k, v, bias, jnp.ones_like(dout) if self.dout_ones else dout]

    def _lengths(self) -> tuple[jax.Array, jax.Array]:
        return jnp.array([self.time // 2, self.time // 4]), jnp.array(
            [self.time // 4, self.time // 2]
        )

    def hidden(self) -> jax.Array:
        """The mask as a bias."""
        mask = jnp.tril(jnp.ones((self.time, self.time)))
        return jnp.where(mask, 0, -jnp.inf).astype(self.dtype)[None, None]

    def theirs(self) -> dict[str, Any]:
        told: dict[str, Any] = {"is_causal": self.causal, "local_window_size": self.window}
        at = jnp.arange(self.time)
        if self.halves:
            half = at >= self.time // 2
            told["mask"] = (half[:, None] == half)[None, None]
        if self.tril:
            told["mask"] = (at[:, None] >= at)[None, None]
        if self.lengths:
            told["query_seq_lengths"], told["key_value_seq_lengths"] = self._lengths()
        return told

    def ours(self) -> dict[str, Any]:
        told: dict[str, Any] = {"causal": self.causal, "window": self.window}
        at = jnp.broadcast_to(jnp.arange(self.time), (self.batch, self.time))
        if self.halves:
            told["segment_ids"] = (at >= self.time // 2).astype(int)
        if self.lengths:  # what is past the end is of no document
            ends = zip(self._lengths(), (1, 2), strict=True)
            told["segment_ids"] = tuple(
                jnp.where(at < end[:, None], 0, beyond) for end, beyond in ends
            )
        return told


MHA = {"heads": (2, 2), "dout_ones": True}
CASES = {
    # ops: test_fused_attention_fwd and _bwd
    "mha-d32": Case(**MHA),
    "mha-segments-tiles-of-64": Case(
        batch=1,
        time=384,
        d=64,
        causal=True,
        halves=True,
        heads=(1, 1),
        dout_ones=True,
        forward=(64, 64),
        dq=(64, 64),
        dkv=(64, 64),
    ),
    "mha-mixed-tiles": Case(
        **MHA, d=64, halves=True, forward=(64, 128), dq=(128, 64), dkv=(64, 128)
    ),
    # skipped there: "Precision issues after CUDA 12.8.1 upgrade"
    "mha-what-jax-skips": Case(**MHA, d=128, causal=True),
    # nn: testDotProductAttention
    "one-head-each": Case(dtype="bfloat16"),
    "grouped-mapped": Case(heads=(4, 2), vmap=True),
    "one-for-all-mapped": Case(heads=(4, 1), dtype="bfloat16", vmap=True),
    "one-for-all": Case(heads=(4, 1)),
    # nn: testDotProductAttentionMask
    "bias": Case(dtype="bfloat16", bias=1),
    "causal": Case(dtype="bfloat16", causal=True),
    "padding": Case(dtype="bfloat16", lengths=True),
    "mask": Case(dtype="bfloat16", tril=True),
    "causal-padding": Case(dtype="bfloat16", causal=True, lengths=True),
    "mask-padding": Case(dtype="bfloat16", tril=True, lengths=True),
    "bias-causal": Case(dtype="bfloat16", bias=1, causal=True),
    "causal-window": Case(dtype="bfloat16", causal=True, window=(3, 2)),
    "window": Case(dtype="bfloat16", window=(3, 0)),
    # nn: testDotProductAttentionBiasGradient
    "bias-of-each": Case(dtype="bfloat16", bias=2),
    "bias-of-each-mapped": Case(dtype="bfloat16", bias=2, vmap=True),
}
BOTH = "xla", "triton:interpret"
# Triton refuses a bias; of the others, those whose code is not run by another
INTERPRETED = (
    *(name for name in CASES if "mha" in name),
    "grouped-mapped",
    "causal-padding",
    "causal-window",
    "window",
)
ASKED = [(name, BOTH[0]) for name in CASES] + [(name, BOTH[1]) for name in INTERPRETED]


def mapped(case: Case, attend, q, k, v, bias):
    if not case.vmap:
        return attend(q, k, v, bias=bias)
    arrays = [x if x is None else x[:, None] for x in (q, k, v, bias)]
    return jax.vmap(lambda q, k, v, bias: attend(q, k, v, bias=bias))(*arrays)[:, 0]


def with_gradients(case: Case, attend):
    @jax.jit
    def both(q, k, v, bias, dout):
        out, pull = jax.vjp(partial(mapped, case, attend), q, k, v, bias)
        return out, *pull(dout)

    return both


@cache
def answers(name):
    """(plain, wanted) of a case: the definition in its own dtype, jax.nn in float32."""
    case = CASES[name]
    arrays, told = (
        case.arrays(),
        {"softcap": None, "scale": None, "positions": None, "segment_ids": None} | case.ours(),
    )

    def definition(q, k, v, bias=None):
        return reference.attend(
            *prepare(q, k, v, bias=case.hidden() if case.tril else bias, **told)
        )[0]

    theirs = partial(jax.nn.dot_product_attention, **case.theirs())
    with jax.default_matmul_precision("highest"):
        want = with_gradients(case, theirs)(
            *(x if x is None else x.astype("float32") for x in arrays)
        )
    return with_gradients(case, definition)(*arrays), want


@pytest.mark.parametrize(("name", "implementation"), ASKED)
def test_attention(name, implementation, tiles):
    case = CASES[name]
    for table in ("FORWARD", "DQ", "DKV"):
        q, k = getattr(case, table.lower())
        tiles.setattr(tiling, table, {2: dict.fromkeys((64, 128, 256), Tile(q, k, 4, 1))})
    tiles.setattr(xla, "BLOCK", case.forward[0])

    def ours(q, k, v, bias=None):
        bias = case.hidden() if case.tril else bias
        return attention(q, k, v, bias=bias, implementation=implementation, **case.ours())

    got = with_gradients(case, ours)(*case.arrays())
    limits = [oracle.VALUE] + [oracle.GRADIENT] * 4
    for of, limit, *three in zip(
        ("out", "dq", "dk", "dv", "dbias"), limits, got, *answers(name), strict=True
    ):
        if three[0] is not None:
            oracle.check(of, *three, case.dtype, limit)


def formula(op, x, scale, bias):
    if op == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_norm(op, implementation):
    """ops: test_fused_layernorm_fwd and _bwd, test_rms_fwd, test_rms_norm_bwd"""
    random = np.random.default_rng(0)
    arrays = [
        np.asarray(random.standard_normal(shape), np.float32)
        for shape in ((2, 384, 192), (192,), (192,))
    ]

    def both(run):
        return lambda *arrays: (
            run(*arrays),
            jax.grad(lambda *arrays: run(*arrays).sum(), (0, 1, 2))(*arrays),
        )

    got = jax.jit(both(partial(getattr(norm, op), eps=1e-5, implementation=implementation)))(
        *arrays
    )
    plain = jax.jit(both(partial(formula, op)))(*arrays)
    want = oracle.in_float64(both(partial(formula, op)), *arrays)
    for name, *three in zip(
        ("y", "dx", "dscale", "dbias"), *map(jax.tree.leaves, (got, plain, want)), strict=True
    ):
        oracle.check(name, *three, "float32", {"float32": 1e-6})
