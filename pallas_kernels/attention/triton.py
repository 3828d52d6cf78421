"""Implements attention after FlashAttention-2 (arXiv:2307.08691), on Triton.

Three kernels: forward; dq; dk and dv. Read `_forward_kernel` first, then `forward`, which launches
it; the other two have the same shape. Lengths are padded to whole tiles and head dims to powers of
two (72 computes as 128). No kernel uses atomics: every sum has a fixed order.

Letters as in problem.py. A program owns tile `at` of one (batch, head) pair; `i` counts tiles of
queries and `j` tiles of keys that it walks over.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.mask import pair_mask
from pallas_kernels.attention.operands import MaskOperands, pad_mask_operands, pad_to
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.attention.tile_ranges import (
    OVER_KEYS,
    OVER_QUERIES,
    possible_ranges,
    tile_bounds,
    walk,
)
from pallas_kernels.attention.tiling import Tile
from pallas_kernels.backends.triton import LOG2E, call, dot, load_block, next_power_of_two
from pallas_kernels.choose import device_kind, no_gpu

GRID_LIMIT = 65535  # programs along the second dim of a CUDA grid
WIDEST = 256  # head dim


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:  # noqa: ARG001
    b, _, h, d = inputs.q_bthd.shape
    e = inputs.v_bske.shape[3]
    if inputs.bias is not None:
        return "no bias"
    if inputs.q_bthd.dtype == jnp.float64:
        return "no float64"
    if max(d, e) > WIDEST:
        return f"head dims up to {WIDEST}, not {max(d, e)}"
    if max(x.size for x in (inputs.q_bthd, inputs.k_bskd, inputs.v_bske)) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    if b * h > GRID_LIMIT:
        return f"batch x heads up to {GRID_LIMIT}, not {b * h}"
    return no_gpu(interpreted)


class _Side(NamedTuple):
    """A tile's queries, or its keys, as the mask needs them: vectors as long as the tile."""

    positions: jax.Array
    segment_ids: jax.Array | None
    is_real: jax.Array  # bool: no padding


@dataclass(frozen=True)
class _Statics:
    """The static arguments of a kernel."""

    problem: Problem
    tile: Tile
    counts: tuple[int, int]  # tiles of queries, tiles of keys
    lengths: tuple[int, int]  # before padding
    group: int  # query heads per key-value head
    ranges: tuple[int, ...]  # of tile_ranges.walk
    is_float32: bool

    @property
    def base(self) -> float:
        """The factor of scores before `exponential` is taken of them.

        exp2 is the GPU's own instruction. float32 takes exp, because multiplying by log2(e) would
        round once more.
        """
        return 1.0 if self.is_float32 else LOG2E

    def exponential(self, x: jax.Array) -> jax.Array:
        return jnp.exp(x) if self.is_float32 else jnp.exp2(x)

    def scores(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns (scores times `base`, the softcap's derivative or None), given q k^T."""
        return self.problem.scores(products, self.base)

    def queries(self, at, masks: MaskOperands) -> _Side:
        """Returns the queries of tile `at`."""
        t, s = self.lengths
        number = at * self.tile.q + jnp.arange(self.tile.q)
        positions = number + (s - t)
        if masks.q_positions is not None:
            positions = load_block(masks.q_positions, at, self.tile.q)
        segment_ids = None
        if masks.q_segment_ids is not None:
            segment_ids = load_block(masks.q_segment_ids, at, self.tile.q)
        return _Side(positions, segment_ids, number < t)

    def keys(self, at, masks: MaskOperands) -> _Side:
        """Returns the keys of tile `at`."""
        _, s = self.lengths
        number = at * self.tile.k + jnp.arange(self.tile.k)
        positions = number
        if masks.kv_positions is not None:
            positions = load_block(masks.kv_positions, at, self.tile.k)
        segment_ids = None
        if masks.kv_segment_ids is not None:
            segment_ids = load_block(masks.kv_segment_ids, at, self.tile.k)
        return _Side(positions, segment_ids, number < s)

    def mask(self, queries: _Side, keys: _Side) -> jax.Array:
        """Returns bool [tile.q, tile.k]: visible pairs."""
        q_segment_ids = kv_segment_ids = None
        if queries.segment_ids is not None and keys.segment_ids is not None:
            q_segment_ids = queries.segment_ids[:, None]
            kv_segment_ids = keys.segment_ids[None]
        is_real = queries.is_real[:, None] & keys.is_real[None]
        mask = pair_mask(
            self.problem,
            queries.positions[:, None],
            keys.positions[None],
            q_segment_ids,
            kv_segment_ids,
        )
        return is_real if mask is None else is_real & mask


def _zero_hidden(x: jax.Array, mask: jax.Array, axis: int) -> jax.Array:
    """Returns x with 0 in rows hidden from all along `axis` of the mask: they may be NaN."""
    visible = jnp.max(mask.astype(jnp.int32), axis) > 0
    return jnp.where(visible[:, None], x, jnp.zeros_like(x))


def _forward_kernel(statics: _Statics, bounds_ref, q_ref, k_ref, v_ref, *rest):
    """Processes one tile of queries of one head, over tiles of keys: the online softmax."""
    *mask_refs, out_ref, lse_ref = rest
    masks = MaskOperands(*mask_refs)
    at = statics.counts[0] - 1 - pl.program_id(0)  # the last tile first: see _query_tile_spec
    q = q_ref[...]
    queries = statics.queries(at, masks)

    def body(masked):
        def step(j, carry):
            largest, total, out = carry
            k = load_block(k_ref, j, statics.tile.k, slice(None))
            v = load_block(v_ref, j, statics.tile.k, slice(None))
            mask = statics.mask(queries, statics.keys(j, masks)) if masked else None
            if mask is not None:
                v = _zero_hidden(v, mask, 0)
            scores, _ = statics.scores(dot(q, k.T))  # [tile.q, tile.k]
            if mask is not None:
                scores = jnp.where(mask, scores, -jnp.inf)
            new_largest = jnp.maximum(largest, scores.max(1))
            # A query without a visible key so far: -inf - -inf would be NaN.
            offset = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
            weights = statics.exponential(scores - offset[:, None])
            rescale = statics.exponential(largest - offset)
            out = out * rescale[:, None] + dot(weights.astype(v.dtype), v)
            total = total * rescale + weights.sum(1)
            return new_largest, total, out

        return step

    start = (
        jnp.full(statics.tile.q, -jnp.inf, jnp.float32),
        jnp.zeros(statics.tile.q, jnp.float32),
        jnp.zeros(out_ref.shape, jnp.float32),
    )
    largest, total, out = walk(statics.ranges, bounds_ref, body, start)
    has_key = total > 0
    total = jnp.where(has_key, total, 1.0)  # 0 / 1, not 0 / 0
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(has_key, largest / statics.base + jnp.log(total), -jnp.inf)


def _dq_kernel(
    statics: _Statics, bounds_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *rest
):
    """Processes one tile of queries of one head, over tiles of keys."""
    *mask_refs, dq_ref = rest
    masks = MaskOperands(*mask_refs)
    at = statics.counts[0] - 1 - pl.program_id(0)
    q = q_ref[...]
    dout = dout_ref[...]
    queries = statics.queries(at, masks)
    lse = lse_ref[...] * statics.base
    delta = delta_ref[...]

    def body(masked):
        def step(j, dq):
            k = load_block(k_ref, j, statics.tile.k, slice(None))
            v = load_block(v_ref, j, statics.tile.k, slice(None))
            mask = statics.mask(queries, statics.keys(j, masks)) if masked else None
            if mask is not None:
                k = _zero_hidden(k, mask, 0)
                v = _zero_hidden(v, mask, 0)
            scores, slope = statics.scores(dot(q, k.T))
            weights = statics.exponential(scores - lse[:, None])
            dweights = dot(dout, v.T)
            dscores = weights * (dweights - delta[:, None])  # the softmax's own gradient
            if slope is not None:
                dscores = dscores * slope
            if mask is not None:
                dscores = jnp.where(mask, dscores, 0.0)
            return dq + dot(dscores.astype(k.dtype), k)

        return step

    dq = walk(statics.ranges, bounds_ref, body, jnp.zeros(dq_ref.shape, jnp.float32))
    # Scores are q k^T times the scale: its factor is applied once, not in every tile.
    dq_ref[...] = (dq * statics.problem.scale).astype(dq_ref.dtype)


def _dkv_kernel(
    statics: _Statics, bounds_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *rest
):
    """Processes one tile of keys of one key-value head, over its query heads and their tiles.

    Scores are transposed, [tile.k, tile.q].
    """
    *mask_refs, dk_ref, dv_ref = rest
    masks = MaskOperands(*mask_refs)
    at = pl.program_id(0)
    k = k_ref[...]
    v = v_ref[...]
    keys = statics.keys(at, masks)

    def add_head(g, carry):
        def body(masked):
            def step(i, carry):
                dk, dv = carry
                q = load_block(q_ref, i, statics.tile.q, g, slice(None))
                dout = load_block(dout_ref, i, statics.tile.q, g, slice(None))
                lse = load_block(lse_ref, i, statics.tile.q, g) * statics.base
                delta = load_block(delta_ref, i, statics.tile.q, g)
                mask = statics.mask(statics.queries(i, masks), keys).T if masked else None
                if mask is not None:
                    q = _zero_hidden(q, mask, 0)
                    dout = _zero_hidden(dout, mask, 0)
                scores, slope = statics.scores(dot(k, q.T))  # [tile.k, tile.q]
                weights = statics.exponential(scores - lse[None])
                if mask is not None:  # dv takes the weights themselves
                    weights = jnp.where(mask, weights, 0.0)
                dv = dv + dot(weights.astype(dout.dtype), dout)
                dweights = dot(v, dout.T)
                dscores = weights * (dweights - delta[None])
                if slope is not None:
                    dscores = dscores * slope
                if mask is not None:
                    dscores = jnp.where(mask, dscores, 0.0)
                dk = dk + dot(dscores.astype(q.dtype), q)
                return dk, dv

            return step

        return walk(statics.ranges, bounds_ref, body, carry)

    start = (jnp.zeros(dk_ref.shape, jnp.float32), jnp.zeros(dv_ref.shape, jnp.float32))
    dk, dv = jax.lax.fori_loop(0, statics.group, add_head, start)
    dk_ref[...] = (dk * statics.problem.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def forward(
    problem: Problem, inputs: Inputs, *, interpret: bool = False, variant: str = ""
) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.forward` does; `variant` is one of tiling.VARIANTS."""
    b, t, h, _ = inputs.q_bthd.shape
    e = inputs.v_bske.shape[3]
    table = _table("attention_forward", variant)
    statics, q, k, v, masks = _pad_operands(problem, inputs, table, OVER_KEYS)
    length = q.shape[1]
    d_padded = q.shape[3]
    e_padded = v.shape[3]
    run = call(
        partial(_forward_kernel, statics),
        grid=(statics.counts[0], b * h),
        inputs=[
            _bounds_spec(statics, h, inputs, OVER_KEYS),
            _query_tile_spec(statics, h, d_padded),
            _all_keys_spec(statics, h, k.shape[1], d_padded),
            _all_keys_spec(statics, h, v.shape[1], e_padded),
            *_mask_specs(masks, h),
        ],
        outputs=[
            (
                jax.ShapeDtypeStruct((b, length, h, e_padded), q.dtype),
                _query_tile_spec(statics, h, e_padded),
            ),
            (
                jax.ShapeDtypeStruct((b, h, length), jnp.float32),
                _query_vector_spec(statics, h),
            ),
        ],
        warps=statics.tile.warps,
        stages=statics.tile.stages,
        interpret=interpret,
        name="attention_forward",
    )
    bounds = tile_bounds(problem, inputs, statics.tile.q, statics.tile.k, OVER_KEYS)
    out, lse = run(bounds, q, k, v, *masks)
    return out[:, :t, :, :e], jnp.moveaxis(lse, 1, 2)[:, :t]


def backward(
    problem: Problem,
    inputs: Inputs,
    out,
    lse,
    dout,
    dlse,
    *,
    interpret: bool = False,
    variant: str = "",
):
    """Does what `xla.backward` does; there is no bias, so no gradient of one."""
    t, s = inputs.lengths
    d = inputs.k_bskd.shape[3]
    e = inputs.v_bske.shape[3]

    def visible_to_bht(x_bth):
        """Returns 0 for a query without a visible key, whose lse is -inf."""
        return jnp.moveaxis(jnp.where(jnp.isneginf(lse), 0, x_bth), 2, 1)

    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    lse_bht = visible_to_bht(lse)
    delta_bht = visible_to_bht(delta)
    how = (interpret, variant)
    dq = _run_dq(problem, inputs, dout, lse_bht, delta_bht, *how)
    dk, dv = _run_dkv(problem, inputs, dout, lse_bht, delta_bht, *how)
    return dq[:, :t, :, :d], dk[:, :s, :, :d], dv[:, :s, :, :e], None


def _run_dq(problem, inputs, dout, lse_bht, delta_bht, interpret, variant) -> jax.Array:
    """Returns dq in padded lengths and head dim."""
    table = _table("attention_dq", variant)
    statics, q, k, v, masks = _pad_operands(problem, inputs, table, OVER_KEYS)
    b, length, h, d_padded = q.shape
    e_padded = v.shape[3]
    dout = pad_to(dout, (b, length, h, e_padded))
    lse_bht = pad_to(lse_bht, (b, h, length))
    delta_bht = pad_to(delta_bht, (b, h, length))
    run = call(
        partial(_dq_kernel, statics),
        grid=(statics.counts[0], b * h),
        inputs=[
            _bounds_spec(statics, h, inputs, OVER_KEYS),
            _query_tile_spec(statics, h, d_padded),
            _all_keys_spec(statics, h, k.shape[1], d_padded),
            _all_keys_spec(statics, h, v.shape[1], e_padded),
            _query_tile_spec(statics, h, e_padded),
            _query_vector_spec(statics, h),
            _query_vector_spec(statics, h),
            *_mask_specs(masks, h),
        ],
        outputs=[
            (jax.ShapeDtypeStruct(q.shape, q.dtype), _query_tile_spec(statics, h, d_padded)),
        ],
        warps=statics.tile.warps,
        stages=statics.tile.stages,
        interpret=interpret,
        name="attention_dq",
    )
    bounds = tile_bounds(problem, inputs, statics.tile.q, statics.tile.k, OVER_KEYS)
    [dq] = run(bounds, q, k, v, dout, lse_bht, delta_bht, *masks)
    return dq


def _run_dkv(
    problem, inputs, dout, lse_bht, delta_bht, interpret, variant
) -> tuple[jax.Array, jax.Array]:
    """Returns dk and dv in padded lengths and head dims."""
    table = _table("attention_dkv", variant)
    statics, q, k, v, masks = _pad_operands(problem, inputs, table, OVER_QUERIES)
    b, length, h, d_padded = q.shape
    kv_heads = k.shape[2]
    e_padded = v.shape[3]
    dout = pad_to(dout, (b, length, h, e_padded))
    lse_bht = pad_to(lse_bht, (b, h, length))
    delta_bht = pad_to(delta_bht, (b, h, length))
    lse_bth = jnp.moveaxis(lse_bht, 1, 2)  # a key-value head's query heads are adjacent
    delta_bth = jnp.moveaxis(delta_bht, 1, 2)

    # Programs (i, n): tile i of keys; n counts batch x key-value heads.

    def all_queries_spec(width):
        return pl.BlockSpec(
            (None, length, statics.group, width), lambda _, n: (n // kv_heads, 0, n % kv_heads, 0)
        )

    def key_tile_spec(width):
        return pl.BlockSpec(
            (None, statics.tile.k, None, width), lambda i, n: (n // kv_heads, i, n % kv_heads, 0)
        )

    all_queries_vector_spec = pl.BlockSpec(
        (None, length, statics.group), lambda _, n: (n // kv_heads, 0, n % kv_heads)
    )
    run = call(
        partial(_dkv_kernel, statics),
        grid=(statics.counts[1], b * kv_heads),
        inputs=[
            _bounds_spec(statics, kv_heads, inputs, OVER_QUERIES),
            all_queries_spec(d_padded),
            key_tile_spec(d_padded),
            key_tile_spec(e_padded),
            all_queries_spec(e_padded),
            all_queries_vector_spec,
            all_queries_vector_spec,
            *_mask_specs(masks, kv_heads),
        ],
        outputs=[
            (jax.ShapeDtypeStruct(k.shape, k.dtype), key_tile_spec(d_padded)),
            (jax.ShapeDtypeStruct(v.shape, v.dtype), key_tile_spec(e_padded)),
        ],
        warps=statics.tile.warps,
        stages=statics.tile.stages,
        interpret=interpret,
        name="attention_dkv",
    )
    bounds = tile_bounds(problem, inputs, statics.tile.q, statics.tile.k, OVER_QUERIES)
    return run(bounds, q, k, v, dout, lse_bth, delta_bth, *masks)


class _Padded(NamedTuple):
    """A kernel's statics, and its operands in whole tiles and power-of-two head dims."""

    statics: _Statics
    q: jax.Array
    k: jax.Array
    v: jax.Array
    masks: MaskOperands


def _pad_operands(problem: Problem, inputs: Inputs, table, over: int) -> _Padded:
    """Pads the operands.

    `table`: of tiling.py; `over`: the side whose tiles a program walks over.
    """
    b, t, h, d = inputs.q_bthd.shape
    _, s, kv_heads, _ = inputs.k_bskd.shape
    d_padded = next_power_of_two(d)
    e_padded = next_power_of_two(inputs.v_bske.shape[3])
    tile = tiling.tile(
        table,
        max(d_padded, e_padded),
        inputs.q_bthd.dtype.itemsize,
        next_power_of_two(t),
        next_power_of_two(s),
    )
    counts = (pl.cdiv(t, tile.q), pl.cdiv(s, tile.k))
    q_length = counts[0] * tile.q
    kv_length = counts[1] * tile.k
    statics = _Statics(
        problem,
        tile,
        counts,
        lengths=(t, s),
        group=inputs.group,
        ranges=possible_ranges(problem, inputs, padded_keys=kv_length != s, over=over),
        is_float32=inputs.q_bthd.dtype == jnp.float32,
    )
    return _Padded(
        statics,
        pad_to(inputs.q_bthd, (b, q_length, h, d_padded)),
        pad_to(inputs.k_bskd, (b, kv_length, kv_heads, d_padded)),
        pad_to(inputs.v_bske, (b, kv_length, kv_heads, e_padded)),
        pad_mask_operands(inputs, q_length, kv_length),
    )


# BlockSpecs of programs (i, n) that own a tile of queries. n counts batch x heads. i counts tiles
# from the last one, which sees most keys if the call is causal: the longest programs start first.


def _bounds_spec(statics: _Statics, heads: int, inputs: Inputs, over: int):
    """Returns the four bounds of the program's tile; one batch of them if the mask is static."""
    shared = inputs.mask_is_static
    last = statics.counts[0] - 1
    return pl.BlockSpec(
        (None, None, 4),
        lambda i, n: (0 if shared else n // heads, last - i if over == OVER_KEYS else i, 0),
    )


def _query_tile_spec(statics: _Statics, heads: int, width: int):
    last = statics.counts[0] - 1
    return pl.BlockSpec(
        (None, statics.tile.q, None, width), lambda i, n: (n // heads, last - i, n % heads, 0)
    )


def _query_vector_spec(statics: _Statics, heads: int):
    last = statics.counts[0] - 1
    return pl.BlockSpec(
        (None, None, statics.tile.q), lambda i, n: (n // heads, n % heads, last - i)
    )


def _all_keys_spec(statics: _Statics, heads: int, length: int, width: int):
    return pl.BlockSpec(
        (None, length, None, width), lambda _, n: (n // heads, 0, n % heads // statics.group, 0)
    )


def _mask_specs(masks: MaskOperands, heads: int):
    """Returns a whole sequence of each; None for one that does not exist."""
    return [
        None if x is None else pl.BlockSpec((None, x.shape[1]), lambda _, n: (n // heads, 0))
        for x in masks
    ]


def _table(kernel: str, variant: str) -> tiling.Table:
    return tiling.varied(tiling.triton_table(kernel, device_kind()), variant)
