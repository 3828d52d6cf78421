"""Implements attention in plain JAX, without T x T arrays.

It goes tile by tile, like FlashAttention (arXiv:2205.14135). The tiles that the window leaves
visible are listed while tracing. One scan walks over that list in the forward pass, one in the
backward pass. Segments and given positions are not known while tracing: they mask pairs inside
tiles, and skip no tile.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.mask import block_mask, pair_mask, positions, zero_hidden
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.choose import device_kind, not_interpretable
from pallas_kernels.wide import wide_dtype

BLOCK = 512  # queries and keys of a tile, at most
# On CPUs a tile's scores stay in a core's cache, and causal attention leaves out more tiles.
CPU_SCORES = 2**18  # of all sequences and heads: 1 MB
CPU_BLOCK = 64  # at least: the steps of the scan cost as well


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:  # noqa: ARG001
    return not_interpretable(interpreted)


def forward(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out [b, t, h, e] in the dtype of q, lse [b, t, h] in float32)."""
    tiled = _TiledInputs(problem, inputs)
    b, padded_t, k, g, _ = tiled.q_btkgd.shape
    e = tiled.v_bske.shape[-1]
    start = (
        jnp.full((b, k, g, padded_t), -jnp.inf, tiled.wide),
        jnp.zeros((b, k, g, padded_t), tiled.wide),
        jnp.zeros((b, k, g, padded_t, e), tiled.wide),
    )

    def step(carry, index):
        tile = tiled.tile(index)
        # The largest score so far, the sum of exp(score - largest), and the sum of that times v.
        largest, total, out = (tiled.q_block(x, index, 3) for x in carry)
        scores, _ = tiled.scores(tile)
        new_largest = jnp.maximum(largest, scores.max(-1))
        # A query without a visible key so far: -inf - -inf would be NaN.
        offset = jnp.where(new_largest == -jnp.inf, 0, new_largest)
        weights = jnp.exp(scores - offset[..., None])
        rescale = jnp.exp(largest - offset)
        part = tiled.dot("bkgts,bske->bkgte", weights.astype(tile.v_bske.dtype), tile.v_bske)
        updated = (
            new_largest,
            total * rescale + weights.sum(-1),
            out * rescale[..., None] + part,
        )
        carry = tuple(
            tiled.put_q_block(x, block, index, 3) for x, block in zip(carry, updated, strict=True)
        )
        return carry, None

    (largest, total, out), _ = jax.lax.scan(step, start, tiled.table)
    has_key = total > 0
    total = jnp.where(has_key, total, 1)  # 0 / 1, not 0 / 0
    lse = jnp.where(has_key, largest + jnp.log(total), -jnp.inf)
    t, h = inputs.q_bthd.shape[1:3]
    out = out / total[..., None]
    out = jnp.moveaxis(out, 3, 1)[:, :t].reshape(b, t, h, e)
    lse = jnp.moveaxis(lse, 3, 1)[:, :t].reshape(b, t, h)
    return out.astype(inputs.q_bthd.dtype), lse


def backward(
    problem: Problem, inputs: Inputs, out, lse, dout, dlse
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns (dq, dk, dv, dbias or None), given the gradients of out and of lse."""
    tiled = _TiledInputs(problem, inputs)
    b, padded_t, k, g, _ = tiled.q_btkgd.shape

    def pad_visible(x_bth):
        """Pads x with 0, and zeroes queries without a visible key: their lse is -inf."""
        return tiled.pad_q(jnp.where(jnp.isneginf(lse), 0, x_bth))

    def to_bkgt(x_bth):
        return jnp.moveaxis(x_bth.reshape(b, padded_t, k, g), 1, 3)

    delta = jnp.sum(out.astype(tiled.wide) * dout.astype(tiled.wide), -1) - dlse
    delta_bth = pad_visible(delta)
    lse_bth = pad_visible(lse)
    delta_bkgt = to_bkgt(delta_bth)
    lse_bkgt = to_bkgt(lse_bth)
    dout_btkge = tiled.pad_q(dout).reshape(b, padded_t, k, g, -1)
    start = [
        jnp.zeros(tiled.q_btkgd.shape, tiled.wide),
        jnp.zeros(tiled.k_bskd.shape, tiled.wide),
        jnp.zeros(tiled.v_bske.shape, tiled.wide),
    ]
    if tiled.bias is not None:
        start.append(jnp.zeros(tiled.bias.shape, tiled.wide))

    def step(carry, index):
        tile = tiled.tile(index)
        dq, dk, dv, *dbias = carry
        dout_block = tiled.q_block(dout_btkge, index, 1)
        if tile.mask is not None:
            dout_block = zero_hidden(dout_block, tile.mask.any((1, 2, 4)))
        scores, slope = tiled.scores(tile)
        weights = jnp.exp(scores - tiled.q_block(lse_bkgt, index, 3)[..., None])
        dv_block = tiled.sum_over_queries(weights.astype(dout_block.dtype), dout_block)
        dweights = tiled.dot("btkge,bske->bkgts", dout_block, tile.v_bske)
        # The softmax's gradient; delta is the sum over keys of weights x dweights, less dlse.
        dscores = weights * (dweights - tiled.q_block(delta_bkgt, index, 3)[..., None])
        if tile.mask is not None:
            dscores = jnp.where(tile.mask, dscores, 0)
        if dbias:  # before the softcap's slope: the bias is added after the cap
            dbias = [tiled.add_bias_block(dbias[0], dscores, index)]
        if slope is not None:
            dscores = dscores * slope
        dscores = dscores * problem.scale
        dscores = dscores.astype(tile.q_btkgd.dtype)
        # In this order, the dot reads the scores as they lie; in the other, transposed.
        dq_block = tiled.dot("bskd,bkgts->btkgd", tile.k_bskd, dscores)
        dk_block = tiled.sum_over_queries(dscores, tile.q_btkgd)
        # Each block is in many tiles: dq, dk and dv are all accumulated.
        carry = [
            tiled.add_q_block(dq, dq_block, index),
            tiled.add_k_block(dk, dk_block, index),
            tiled.add_k_block(dv, dv_block, index),
            *dbias,
        ]
        return carry, None

    (dq, dk, dv, *dbias), _ = jax.lax.scan(step, start, tiled.table)
    t, s = inputs.lengths
    dq = dq[:, :t].reshape(inputs.q_bthd.shape)
    dbias = tiled.unpad_bias(dbias[0]) if dbias else None
    dk = dk[:, :s]
    dv = dv[:, :s]
    dtype = inputs.q_bthd.dtype
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), dbias


@dataclass(frozen=True)
class _Tile:
    """One tile's blocks of the arrays. Rows of q, k and v without a visible pair in it are 0."""

    q_btkgd: jax.Array
    k_bskd: jax.Array
    v_bske: jax.Array
    mask: jax.Array | None  # bool [b or 1, k or 1, g or 1, t, s]; None: every pair is visible
    bias: jax.Array | None  # [b or 1, k or 1, g or 1, t or 1, s or 1]


class _TiledInputs:
    """The arrays, padded to whole tiles, and `table`: int32 [tiles, 2], (query block, key block).

    `index` in the methods is a row of the table. Query heads are split into [k, g].
    """

    def __init__(self, problem: Problem, inputs: Inputs):
        self.problem = problem
        self.inputs = inputs
        _, t, h, d = inputs.q_bthd.shape
        _, s, k, _ = inputs.k_bskd.shape
        self.block_q, self.block_k = _blocks(inputs)
        self.wide = wide_dtype(inputs.q_bthd)
        exact = inputs.q_bthd.dtype == jnp.float32  # not rounded to TF32, nor to bfloat16 on TPU
        self.dot = partial(
            jnp.einsum,
            preferred_element_type=self.wide,
            precision=jax.lax.Precision.HIGHEST if exact else None,
        )
        q = self.pad_q(inputs.q_bthd)
        self.q_btkgd = q.reshape(*q.shape[:2], k, h // k, d)
        self.k_bskd = self.pad_k(inputs.k_bskd)
        self.v_bske = self.pad_k(inputs.v_bske)
        q_positions, kv_positions = positions(inputs)
        self.q_positions = self.pad_q(q_positions)
        self.kv_positions = self.pad_k(kv_positions)
        if inputs.has_segments:
            self.q_segment_ids = self.pad_q(inputs.q_segment_ids)
            self.kv_segment_ids = self.pad_k(inputs.kv_segment_ids)
        self.bias = None if inputs.bias is None else self._pad_bias(inputs.bias, k, h // k)
        visible, full = self._block_mask()
        table = jnp.asarray(np.argwhere(visible[0]).reshape(-1, 2), jnp.int32)
        self.table = _tied(table, self.q_btkgd)
        # One scan has one body: if any tile needs a mask, all get one.
        # A tile with padded keys is not full; one with padded queries may be, so they are tested.
        self.needs_mask = (
            inputs.has_segments
            or inputs.bias is not None
            or bool(t % self.block_q)
            or not full[visible].all()
        )

    def _block_mask(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the part of `block_mask` that is known while tracing: only that of the window."""
        static = self.inputs._replace(
            q_segment_ids=None, kv_segment_ids=None, q_positions=None, kv_positions=None
        )
        visible, full = block_mask(self.problem, static, self.block_q, self.block_k)
        if self.inputs.has_positions:
            return np.ones_like(visible), np.zeros_like(full)
        return visible, full

    def tile(self, index: jax.Array) -> _Tile:
        q = self.q_block(self.q_btkgd, index, 1)
        k = self.k_block(self.k_bskd, index, 1)
        v = self.k_block(self.v_bske, index, 1)
        bias = None if self.bias is None else self._bias_block(self.bias, index)
        mask = None
        if self.needs_mask:
            mask = self._mask(index, bias)
            # These rows are hidden in this tile, but perhaps not in others.
            q = zero_hidden(q, mask.any((1, 2, 4)))
            k = zero_hidden(k, mask.any((1, 2, 3)))
            v = zero_hidden(v, mask.any((1, 2, 3)))
        return _Tile(q, k, v, mask, bias)

    def _mask(self, index: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Returns bool [b or 1, k or 1, g or 1, block_q, block_k]; padding is hidden."""
        q_positions = self.q_block(self.q_positions, index, 1)[:, :, None]
        kv_positions = self.k_block(self.kv_positions, index, 1)[:, None]
        q_segment_ids = kv_segment_ids = None
        if self.inputs.has_segments:
            q_segment_ids = self.q_block(self.q_segment_ids, index, 1)[:, :, None]
            kv_segment_ids = self.k_block(self.kv_segment_ids, index, 1)[:, None]
        t, s = self.inputs.lengths
        q_is_real = (index[0] * self.block_q + jnp.arange(self.block_q) < t)[None, :, None]
        k_is_real = (index[1] * self.block_k + jnp.arange(self.block_k) < s)[None, None]
        is_real = q_is_real & k_is_real
        mask = pair_mask(self.problem, q_positions, kv_positions, q_segment_ids, kv_segment_ids)
        mask = (is_real if mask is None else is_real & mask)[:, None, None]
        return mask if bias is None else mask & (bias > -jnp.inf)

    def scores(self, tile: _Tile) -> tuple[jax.Array, jax.Array | None]:
        """Returns (scores [b, k, g, t, s], -inf where hidden; the softcap's derivative or None)."""
        scores = self.dot("btkgd,bskd->bkgts", tile.q_btkgd, tile.k_bskd) * self.problem.scale
        slope = None
        if self.problem.softcap is not None:
            capped = jnp.tanh(scores / self.problem.softcap)
            scores = capped * self.problem.softcap
            slope = 1 - capped * capped
        if tile.bias is not None:
            scores = scores + tile.bias.astype(self.wide)
        if tile.mask is not None:
            scores = jnp.where(tile.mask, scores, -jnp.inf)
        return scores, slope

    def sum_over_queries(self, weights_bkgts: jax.Array, x_btkgd: jax.Array) -> jax.Array:
        """Sums over t for each head, then over the heads of a group: [b, s, k, d].

        One long sum over both would be less precise.
        """
        return self.dot("bkgts,btkgd->bskgd", weights_bkgts, x_btkgd).sum(3)

    # Blocks along a time dim: read, written, added to.

    def q_block(self, x, index, dim):
        return jax.lax.dynamic_slice_in_dim(x, index[0] * self.block_q, self.block_q, dim)

    def k_block(self, x, index, dim):
        return jax.lax.dynamic_slice_in_dim(x, index[1] * self.block_k, self.block_k, dim)

    def put_q_block(self, x, block, index, dim):
        return jax.lax.dynamic_update_slice_in_dim(x, block, index[0] * self.block_q, dim)

    def add_q_block(self, x, block, index):
        return self.put_q_block(x, self.q_block(x, index, 1) + block, index, 1)

    def add_k_block(self, x, block, index):
        updated = self.k_block(x, index, 1) + block
        return jax.lax.dynamic_update_slice_in_dim(x, updated, index[1] * self.block_k, 1)

    def pad_q(self, x, dim: int = 1):
        return _pad_to_blocks(x, self.block_q, dim)

    def pad_k(self, x, dim: int = 1):
        return _pad_to_blocks(x, self.block_k, dim)

    # The bias: [b or 1, k or 1, g or 1, t or 1, s or 1] here, its dims of size 1 broadcast.

    def _pad_bias(self, bias: jax.Array, k: int, g: int) -> jax.Array:
        if bias.shape[2] > 1:
            bias = self.pad_q(bias, 2)
        if bias.shape[3] > 1:
            bias = self.pad_k(bias, 3)
        heads = (k, g) if bias.shape[1] > 1 else (1, 1)
        return bias.reshape(bias.shape[0], *heads, *bias.shape[2:])

    def _bias_block(self, bias: jax.Array, index: jax.Array) -> jax.Array:
        if bias.shape[3] > 1:
            bias = self.q_block(bias, index, 3)
        if bias.shape[4] > 1:
            bias = self.k_block(bias, index, 4)
        return bias

    def add_bias_block(self, dbias, dscores_bkgts, index):
        """Adds a tile's gradient of scores, summed over the dims that the bias broadcasts."""
        broadcast = [dim for dim in range(5) if dbias.shape[dim] == 1]
        part = dscores_bkgts.sum(broadcast, keepdims=True)
        # Indices of one dtype: a plain 0 has 64 bits under jax_enable_x64.
        start = [jnp.zeros_like(index[0])] * 5
        if dbias.shape[3] > 1:
            start[3] = index[0] * self.block_q
        if dbias.shape[4] > 1:
            start[4] = index[1] * self.block_k
        before = jax.lax.dynamic_slice(dbias, start, part.shape)
        return jax.lax.dynamic_update_slice(dbias, before + part, start)

    def unpad_bias(self, dbias: jax.Array) -> jax.Array:
        """Returns dbias in the shape and dtype of the given bias."""
        bias = self.inputs.bias
        assert bias is not None, "only a bias that was given has a gradient"
        b, _, _, t, s = dbias.shape
        whole = dbias.reshape(b, -1, t, s)
        return whole[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def _blocks(inputs: Inputs) -> tuple[int, int]:
    """Returns the queries and the keys of a tile."""
    t, s = inputs.lengths
    if device_kind() != "cpu":
        return min(BLOCK, t), min(BLOCK, s)
    b, _, h, _ = inputs.q_bthd.shape
    scores = CPU_SCORES // (b * h)
    side = max(CPU_BLOCK, math.isqrt(scores))
    keys = side if t > side else max(side, scores // t)
    return min(BLOCK, _even(t, side)), min(BLOCK, _even(s, keys))


def _even(length: int, at_most: int) -> int:
    """Returns a block size, at most this one, that leaves little padding."""
    return -(-length // -(-length // at_most))


def _tied(table: jax.Array, q: jax.Array) -> jax.Array:
    """Makes jax believe that `table` depends on q.

    Masks follow only from the table. In a scan over layers they would be loop invariants: jax would
    compute the masks of all tiles at once, outside the loop, and keep t x s booleans.
    """
    one = jax.lax.slice(q, [0] * q.ndim, [1] * q.ndim)
    table, _ = jax.lax.optimization_barrier((table, one))
    return table


def _pad_to_blocks(x: jax.Array, block: int, dim: int) -> jax.Array:
    extra = -x.shape[dim] % block
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, extra)
    return jnp.pad(x, widths)
