"""Attention as FlashAttention-2 (arXiv:2307.08691) has it, on Triton: kernels for forward, for dq, for dk and dv.

No atomics: every sum has one order. Lengths are padded to whole tiles and head dims to powers of two (72 computes as
128). The tiles that a program visits come as bounds: tiles before and after need no visit, and those in the middle,
where everything is seen, no mask. Letters as in problem.py; `at` numbers a tile, `head` a query head.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.plan import bounds, padded, padded_places, parts, scores, visit
from pallas_kernels.attention.problem import Inputs, Problem, sees
from pallas_kernels.attention.tiling import Tile
from pallas_kernels.backends.triton import LOG2E, call, dot, power_of_two, rows
from pallas_kernels.choose import device_kind, no_gpu

GRID_LIMIT = 65535  # programs along the second dim of a CUDA grid


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:  # noqa: ARG001
    b, _, h, d = inputs.q_bthd.shape
    e = inputs.v_bske.shape[3]
    if inputs.bias is not None:
        return "no bias"
    if inputs.q_bthd.dtype == jnp.float64:
        return "no float64"
    if max(d, e) > 256:
        return f"head dims up to 256, not {max(d, e)}"
    if max(x.size for x in inputs[:3]) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    if b * h > GRID_LIMIT:
        return f"batch x heads up to {GRID_LIMIT}, not {b * h}"
    return no_gpu(interpreted)


@dataclass(frozen=True)
class _Plan:
    """What a kernel knows: the problem, its tile, how many tiles there are, the lengths before padding."""

    problem: Problem
    tile: Tile
    counts: tuple[int, int]  # of query tiles, of key tiles
    lengths: tuple[int, int]
    group: int
    parts: tuple[int, ...]  # of `visit`, those that may have tiles
    exact: bool  # float32: exp, as exp2 of scores times log2(e) rounds once more

    @property
    def base(self) -> float:
        """What scores are multiplied by before `power` of them is taken."""
        return 1.0 if self.exact else LOG2E

    def power(self, x: jax.Array) -> jax.Array:
        return jnp.exp(x) if self.exact else jnp.exp2(x)

    def scores(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(scores for `power`, slope of the softcap or None)"""
        return scores(self.problem, products, self.base)

    def queries(self, at, places):
        """(positions, segments or None, whether they are there) of the queries of tile `at`."""
        segments, positions = places[0], places[2]
        number = at * self.tile.q + jnp.arange(self.tile.q)
        own = number + (self.lengths[1] - self.lengths[0])
        own = own if positions is None else rows(positions, at, self.tile.q)
        return own, None if segments is None else rows(segments, at, self.tile.q), number < self.lengths[0]

    def keys(self, at, places):
        """(positions, segments or None, whether they are there) of the keys of tile `at`."""
        segments, positions = places[1], places[3]
        number = at * self.tile.k + jnp.arange(self.tile.k)
        own = number if positions is None else rows(positions, at, self.tile.k)
        return own, None if segments is None else rows(segments, at, self.tile.k), number < self.lengths[1]

    def seen(self, queries, keys) -> jax.Array:
        """[q, k]"""
        split = () if queries[1] is None else (queries[1][:, None], keys[1][None])
        there = queries[2][:, None] & keys[2][None]
        seen = sees(self.problem, queries[0][:, None], keys[0][None], *split)
        return there if seen is None else there & seen


def _kept(x: jax.Array, seen: jax.Array, axis: int) -> jax.Array:
    """The rows of x that something sees, else 0: they may be NaN."""
    some = jnp.max(seen.astype(jnp.int32), axis) > 0
    return jnp.where(some[:, None], x, jnp.zeros_like(x))


def _forward_kernel(plan: _Plan, limits, q_ref, k_ref, v_ref, *rest):
    *places, out_ref, lse_ref = rest
    at = plan.counts[0] - 1 - pl.program_id(0)
    q, queries = q_ref[...], plan.queries(at, places)

    def body(masked):
        def step(j, carry):
            largest, total, out = carry
            k, v = rows(k_ref, j, plan.tile.k, slice(None)), rows(v_ref, j, plan.tile.k, slice(None))
            if masked:
                seen = plan.seen(queries, plan.keys(j, places))
                v = _kept(v, seen, 0)
            scores, _ = plan.scores(dot(q, k.T))
            if masked:
                scores = jnp.where(seen, scores, -jnp.inf)
            new = jnp.maximum(largest, scores.max(1))
            base = jnp.where(new == -jnp.inf, 0.0, new)
            weights, shrink = plan.power(scores - base[:, None]), plan.power(largest - base)
            out = out * shrink[:, None] + dot(weights.astype(v.dtype), v)
            return new, total * shrink + weights.sum(1), out

        return step

    start = jnp.full(plan.tile.q, -jnp.inf, jnp.float32), jnp.zeros(plan.tile.q, jnp.float32)
    largest, total, out = visit(plan.parts, limits, body, (*start, jnp.zeros(out_ref.shape, jnp.float32)))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(some, largest / plan.base + jnp.log(total), -jnp.inf)


def _dq_kernel(plan: _Plan, limits, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *rest):
    *places, dq_ref = rest
    at = plan.counts[0] - 1 - pl.program_id(0)
    q, dout, queries = q_ref[...], dout_ref[...], plan.queries(at, places)
    lse, delta = lse_ref[...] * plan.base, delta_ref[...]

    def body(masked):
        def step(j, dq):
            k, v = rows(k_ref, j, plan.tile.k, slice(None)), rows(v_ref, j, plan.tile.k, slice(None))
            if masked:
                seen = plan.seen(queries, plan.keys(j, places))
                k, v = _kept(k, seen, 0), _kept(v, seen, 0)
            scores, slope = plan.scores(dot(q, k.T))
            dscores = plan.power(scores - lse[:, None]) * (dot(dout, v.T) - delta[:, None])
            dscores = dscores if slope is None else dscores * slope
            if masked:
                dscores = jnp.where(seen, dscores, 0.0)
            return dq + dot(dscores.astype(k.dtype), k)

        return step

    dq = visit(plan.parts, limits, body, jnp.zeros(dq_ref.shape, jnp.float32))
    dq_ref[...] = (dq * plan.problem.scale).astype(dq_ref.dtype)


def _dkv_kernel(plan: _Plan, limits, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *rest):
    """Scores are transposed, [k, q]; the query heads that share these keys come one after the other."""
    *places, dk_ref, dv_ref = rest
    at = pl.program_id(0)
    k, v, keys = k_ref[...], v_ref[...], plan.keys(at, places)

    def head(g, carry):
        def body(masked):
            def step(i, carry):
                dk, dv = carry
                q, dout = rows(q_ref, i, plan.tile.q, g, slice(None)), rows(dout_ref, i, plan.tile.q, g, slice(None))
                lse, delta = rows(lse_ref, i, plan.tile.q, g) * plan.base, rows(delta_ref, i, plan.tile.q, g)
                if masked:
                    seen = plan.seen(plan.queries(i, places), keys).T
                    q, dout = _kept(q, seen, 0), _kept(dout, seen, 0)
                scores, slope = plan.scores(dot(k, q.T))
                weights = plan.power(scores - lse[None])
                weights = jnp.where(seen, weights, 0.0) if masked else weights
                dv = dv + dot(weights.astype(dout.dtype), dout)
                dscores = weights * (dot(v, dout.T) - delta[None])
                dscores = dscores if slope is None else dscores * slope
                if masked:
                    dscores = jnp.where(seen, dscores, 0.0)
                return dk + dot(dscores.astype(q.dtype), q), dv

            return step

        return visit(plan.parts, limits, body, carry)

    start = jnp.zeros(dk_ref.shape, jnp.float32), jnp.zeros(dv_ref.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, plan.group, head, start)
    dk_ref[...] = (dk * plan.problem.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def forward(problem: Problem, inputs: Inputs, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `xla.forward`."""
    (b, t, h, _), e = inputs.q_bthd.shape, inputs.v_bske.shape[3]
    plan, q, k, v, places = _planned(problem, inputs, tiling.FORWARD, True)
    count, length = plan.counts[0], q.shape[1]
    queries, keys = _by_query(plan, h, q.shape[3]), partial(_all_keys, plan, h, k.shape[1])
    run = call(
        partial(_forward_kernel, plan),
        grid=(count, b * h),
        inputs=[_bounds_spec(h, inputs, count), queries, keys(k.shape[3]), keys(v.shape[3]), *_place_specs(places, h)],
        outputs=[
            (jax.ShapeDtypeStruct((b, length, h, v.shape[3]), q.dtype), _by_query(plan, h, v.shape[3])),
            (jax.ShapeDtypeStruct((b, h, length), jnp.float32), _row_spec(plan, h)),
        ],
        warps=plan.tile.warps,
        stages=plan.tile.stages,
        interpret=interpret,
        name="attention_forward",
    )
    out, lse = run(bounds(problem, inputs, plan.tile.q, plan.tile.k, 2), q, k, v, *places)
    return out[:, :t, :, :e], jnp.moveaxis(lse, 1, 2)[:, :t]


def backward(problem: Problem, inputs: Inputs, out, lse, dout, dlse, *, interpret: bool = False):
    """As `xla.backward`; no bias, so no gradient of it."""
    (b, t, h, d), (_, s, shared, _), e = inputs.q_bthd.shape, inputs.k_bskd.shape, inputs.v_bske.shape[3]
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    lse, delta = (jnp.moveaxis(jnp.where(jnp.isneginf(lse), 0, x), 2, 1) for x in (lse, delta))

    def arrays(table, by_query):
        plan, q, k, v, places = _planned(problem, inputs, table, by_query)
        length = q.shape[1]
        own = padded(dout, (b, length, h, v.shape[3])), *(padded(x, (b, h, length)) for x in (lse, delta))
        return plan, (q, k, v, *own), places

    plan, given, places = arrays(tiling.DQ, True)
    (q, k, v, dout_p, *_), count = given, plan.counts[0]
    keys = partial(_all_keys, plan, h, k.shape[1])
    common = {"warps": plan.tile.warps, "stages": plan.tile.stages, "interpret": interpret}
    run = call(
        partial(_dq_kernel, plan),
        grid=(count, b * h),
        inputs=[
            _bounds_spec(h, inputs, count),
            _by_query(plan, h, q.shape[3]),
            keys(k.shape[3]),
            keys(v.shape[3]),
            _by_query(plan, h, v.shape[3]),
            _row_spec(plan, h),
            _row_spec(plan, h),
            *_place_specs(places, h),
        ],  # fmt: skip
        outputs=[(jax.ShapeDtypeStruct(q.shape, q.dtype), _by_query(plan, h, q.shape[3]))],
        name="attention_dq",
        **common,
    )
    [dq] = run(bounds(problem, inputs, plan.tile.q, plan.tile.k, 2), *given, *places)

    plan, given, places = arrays(tiling.dkv(device_kind()), False)
    (q, k, v, dout_p, *_), count, group = given, plan.counts[1], plan.group
    common = {"warps": plan.tile.warps, "stages": plan.tile.stages, "interpret": interpret}

    def all_queries(width):
        return pl.BlockSpec((None, q.shape[1], group, width), lambda _, n: (n // shared, 0, n % shared, 0))

    def by_key(width):
        return pl.BlockSpec((None, plan.tile.k, None, width), lambda i, n: (n // shared, i, n % shared, 0))

    all_rows = pl.BlockSpec((None, q.shape[1], group), lambda _, n: (n // shared, 0, n % shared))
    lse_p, delta_p = (jnp.moveaxis(x, 1, 2) for x in given[4:])
    run = call(
        partial(_dkv_kernel, plan),
        grid=(count, b * shared),
        inputs=[
            _bounds_spec(shared, inputs, None),
            all_queries(q.shape[3]),
            by_key(k.shape[3]),
            by_key(v.shape[3]),
            all_queries(v.shape[3]),
            all_rows,
            all_rows,
            *_place_specs(places, shared),
        ],  # fmt: skip
        outputs=[(jax.ShapeDtypeStruct(x.shape, x.dtype), by_key(x.shape[3])) for x in (k, v)],
        name="attention_dkv",
        **common,
    )
    dk, dv = run(bounds(problem, inputs, plan.tile.q, plan.tile.k, 1), q, k, v, dout_p, lse_p, delta_p, *places)
    return dq[:, :t, :, :d], dk[:, :s, :, :d], dv[:, :s, :, :e], None


def _planned(problem, inputs, table, by_query):
    """(plan, q, k, v, places), the arrays padded; places: segments and positions, each of queries and of keys."""
    t, s = inputs.lengths
    d, e = (power_of_two(x.shape[3]) for x in (inputs.k_bskd, inputs.v_bske))
    tile = tiling.tile(table, max(d, e), inputs.q_bthd.dtype.itemsize, power_of_two(t), power_of_two(s))
    counts = -(-t // tile.q), -(-s // tile.k)
    long, wide = counts[0] * tile.q, counts[1] * tile.k
    (b, _, h, _), shared = inputs.q_bthd.shape, inputs.k_bskd.shape[2]
    q = padded(inputs.q_bthd, (b, long, h, d))
    k, v = padded(inputs.k_bskd, (b, wide, shared, d)), padded(inputs.v_bske, (b, wide, shared, e))
    places = padded_places(inputs, b, (long, wide))
    some = parts(problem, inputs, wide == s, by_query)
    exact = inputs.q_bthd.dtype == jnp.float32
    return _Plan(problem, tile, counts, (t, s), inputs.group, some, exact), q, k, v, places


def _bounds_spec(heads: int, inputs: Inputs, count: int | None):
    """`count`: of query tiles, which run last to first: with causal the longest first. None: key tiles."""
    known = inputs.segments is None and inputs.positions is None
    return pl.BlockSpec(
        (None, None, 4), lambda i, n: (0 if known else n // heads, i if count is None else count - 1 - i, 0)
    )


def _by_query(plan: _Plan, heads: int, width: int):
    count = plan.counts[0]
    return pl.BlockSpec((None, plan.tile.q, None, width), lambda i, n: (n // heads, count - 1 - i, n % heads, 0))


def _row_spec(plan: _Plan, heads: int):
    count = plan.counts[0]
    return pl.BlockSpec((None, None, plan.tile.q), lambda i, n: (n // heads, n % heads, count - 1 - i))


def _all_keys(plan: _Plan, heads: int, length: int, width: int):
    return pl.BlockSpec((None, length, None, width), lambda _, n: (n // heads, 0, n % heads // plan.group, 0))


def _place_specs(places, heads: int):
    return [None if x is None else pl.BlockSpec((None, x.shape[1]), lambda _, n: (n // heads, 0)) for x in places]
