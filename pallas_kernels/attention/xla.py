"""Attention in plain JAX, tile after tile as FlashAttention (arXiv:2205.14135) does it: T x T is never there at once.

The tiles that may hold something, known before the program runs where neither segments nor positions are given, are a
table; one scan walks it forward, one backward.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.problem import Inputs, Problem, sees, tiles

BLOCK = 512  # queries and keys of a tile


def refusal(problem: Problem, inputs: Inputs, interpreted: bool) -> str:  # noqa: ARG001
    return "has no interpreted form" if interpreted else ""


def forward(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """(out [b, t, h, e] in the dtype of q, lse [b, t, h] in float32)."""
    work = _Tiles(problem, inputs)
    (b, t, k, g, _), e = work.q.shape, work.v.shape[-1]
    start = (
        jnp.full((b, k, g, t), -jnp.inf, work.wide),
        jnp.zeros((b, k, g, t), work.wide),
        jnp.zeros((b, k, g, t, e), work.wide),
    )

    def step(carry, at):
        tile = work.at(at)
        largest, total, out = (work.rows(x, at, 3) for x in carry)
        scores, _ = work.scores(tile)
        new = jnp.maximum(largest, scores.max(-1))
        base = jnp.where(new == -jnp.inf, 0, new)
        weights, shrink = jnp.exp(scores - base[..., None]), jnp.exp(largest - base)
        part = work.dot("bkgts,bske->bkgte", weights.astype(tile.v.dtype), tile.v)
        updated = new, total * shrink + weights.sum(-1), out * shrink[..., None] + part
        return tuple(work.put_rows(x, y, at, 3) for x, y in zip(carry, updated, strict=True)), None

    (largest, total, out), _ = jax.lax.scan(step, start, work.table)
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)
    t, h = inputs.q_bthd.shape[1:3]
    out = jnp.moveaxis(out / total[..., None], 3, 1)[:, :t].reshape(b, t, h, e)
    return out.astype(inputs.q_bthd.dtype), jnp.moveaxis(lse, 3, 1)[:, :t].reshape(b, t, h)


def backward(problem: Problem, inputs: Inputs, out, lse, dout, dlse) -> tuple[jax.Array, ...]:
    """(dq, dk, dv, dbias or None); dlse is the gradient of lse."""
    work = _Tiles(problem, inputs)
    b, t, k, g, d = work.q.shape
    delta = jnp.sum(out.astype(work.wide) * dout.astype(work.wide), -1) - dlse
    delta, lse = (work.padded_rows(jnp.where(jnp.isneginf(lse), 0, x)) for x in (delta, lse))
    delta, lse = (jnp.moveaxis(x.reshape(b, t, k, g), 1, 3) for x in (delta, lse))
    dout = work.padded_rows(dout).reshape(b, t, k, g, -1)
    start = [jnp.zeros(x.shape, work.wide) for x in (work.q, work.k, work.v)]
    if work.bias is not None:
        start.append(jnp.zeros(work.bias.shape, work.wide))

    def step(carry, at):
        tile = work.at(at)
        dq, dk, dv, *dbias = carry
        dout_t = work.rows(dout, at, 1)
        if tile.seen is not None:
            dout_t = _kept(dout_t, tile.seen.any((1, 2, 4)))
        scores, slope = work.scores(tile)
        weights = jnp.exp(scores - work.rows(lse, at, 3)[..., None])
        dv_t = work.over_queries(weights.astype(dout_t.dtype), dout_t)
        dweights = work.dot("btkge,bske->bkgts", dout_t, tile.v)
        dscores = weights * (dweights - work.rows(delta, at, 3)[..., None])
        if tile.seen is not None:
            dscores = jnp.where(tile.seen, dscores, 0)
        if dbias:
            dbias = [work.add_bias(dbias[0], dscores, at)]
        dscores = dscores * problem.scale if slope is None else dscores * slope * problem.scale
        dscores = dscores.astype(tile.q.dtype)
        dq_t = work.dot("bkgts,bskd->btkgd", dscores, tile.k)
        dk_t = work.over_queries(dscores, tile.q)
        return [work.add_rows(dq, dq_t, at), work.add_keys(dk, dk_t, at), work.add_keys(dv, dv_t, at), *dbias], None

    (dq, dk, dv, *dbias), _ = jax.lax.scan(step, start, work.table)
    t, s = inputs.lengths
    dq = dq[:, :t].reshape(inputs.q_bthd.shape)
    if dbias:
        shape = inputs.bias.shape
        dbias = dbias[0].reshape(*dbias[0].shape[:1], -1, *dbias[0].shape[3:])[:, :, : shape[2], : shape[3]]
        dbias = dbias.astype(inputs.bias.dtype)
    return (
        *(x.astype(inputs.q_bthd.dtype) for x in (dq, dk[:, :s], dv[:, :s])),
        dbias if inputs.bias is not None else None,
    )


class _Tile:
    def __init__(self, q, k, v, seen, bias):
        self.q, self.k, self.v, self.seen, self.bias = q, k, v, seen, bias


class _Tiles:
    """The arrays, padded to whole tiles (their time dims grown), and the table [tiles, 2] of (query, key) tiles."""

    def __init__(self, problem: Problem, inputs: Inputs):
        self.problem, self.inputs = problem, inputs
        (_, t, h, d), (_, s, k, _) = inputs.q_bthd.shape, inputs.k_bskd.shape
        self.block_q, self.block_k = min(BLOCK, t), min(BLOCK, s)
        self.wide = jnp.promote_types(jnp.float32, inputs.q_bthd.dtype)
        self.dot = partial(
            jnp.einsum,
            preferred_element_type=self.wide,
            precision=jax.lax.Precision.HIGHEST if inputs.q_bthd.dtype == jnp.float32 else None,
        )
        self.q = self.padded_rows(inputs.q_bthd)
        self.q = self.q.reshape(*self.q.shape[:2], k, h // k, d)
        self.k, self.v = self._padded_keys(inputs.k_bskd, 1), self._padded_keys(inputs.v_bske, 1)
        q_position, k_position = inputs.positions or (jnp.arange(t)[None] + s - t, jnp.arange(s)[None])
        self.positions = self.padded_rows(q_position), self._padded_keys(k_position, 1)
        self.segments = None
        if inputs.segments is not None:
            self.segments = self.padded_rows(inputs.segments[0]), self._padded_keys(inputs.segments[1], 1)
        self.bias = None
        if inputs.bias is not None:
            bias = self.padded_rows(inputs.bias, 2) if inputs.bias.shape[2] > 1 else inputs.bias
            bias = self._padded_keys(bias, 3) if bias.shape[3] > 1 else bias
            heads = (k, h // k) if bias.shape[1] > 1 else (1, 1)
            self.bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
        visible, full = tiles(problem, inputs._replace(segments=None, positions=None), self.block_q, self.block_k)
        if inputs.positions is not None:
            visible, full = np.ones_like(visible), np.zeros_like(full)
        self.table = jnp.asarray(np.argwhere(visible[0]).reshape(-1, 2), jnp.int32)
        ragged = bool(t % self.block_q)
        self.masked = inputs.segments is not None or inputs.bias is not None or ragged or not full[visible].all()

    def at(self, at: jax.Array) -> _Tile:
        """With what nothing in the tile sees set to 0: it may be NaN."""
        q, k, v = self.rows(self.q, at, 1), self.keys(self.k, at, 1), self.keys(self.v, at, 1)
        bias, seen = None, None
        if self.bias is not None:
            bias = self.rows(self.bias, at, 3) if self.bias.shape[3] > 1 else self.bias
            bias = self.keys(bias, at, 4) if bias.shape[4] > 1 else bias
        if self.masked:
            seen = self._seen(at, bias)
            q, k, v = (_kept(x, seen.any(dims)) for x, dims in ((q, (1, 2, 4)), (k, (1, 2, 3)), (v, (1, 2, 3))))
        return _Tile(q, k, v, seen, bias)

    def _seen(self, at: jax.Array, bias) -> jax.Array:
        """[b or 1, k or 1, g or 1, block_q, block_k]"""
        places = self.rows(self.positions[0], at, 1)[:, :, None], self.keys(self.positions[1], at, 1)[:, None]
        split = ()
        if self.segments is not None:
            split = self.rows(self.segments[0], at, 1)[:, :, None], self.keys(self.segments[1], at, 1)[:, None]
        t, s = self.inputs.lengths
        q_there = (at[0] * self.block_q + jnp.arange(self.block_q) < t)[None, :, None]
        there = q_there & (at[1] * self.block_k + jnp.arange(self.block_k) < s)[None, None]
        seen = sees(self.problem, *places, *split)
        seen = (there if seen is None else there & seen)[:, None, None]
        return seen if bias is None else seen & (bias > -jnp.inf)

    def scores(self, tile: _Tile) -> tuple[jax.Array, jax.Array | None]:
        """(scores [b, k, g, t, s], -inf where not seen; slope of the softcap, None without)."""
        scores, slope = self.dot("btkgd,bskd->bkgts", tile.q, tile.k) * self.problem.scale, None
        if self.problem.softcap is not None:
            capped = jnp.tanh(scores / self.problem.softcap)
            scores, slope = capped * self.problem.softcap, 1 - capped * capped
        if tile.bias is not None:
            scores = scores + tile.bias.astype(self.wide)
        return scores if tile.seen is None else jnp.where(tile.seen, scores, -jnp.inf), slope

    def over_queries(self, weights_bkgts: jax.Array, x_btkgd: jax.Array) -> jax.Array:
        """[b, s, k, d]: head by head, then those of a group together. One sum over both loses digits as it grows."""
        return self.dot("bkgts,btkgd->bskgd", weights_bkgts, x_btkgd).sum(3)

    # Slices along time, and what is put or added there

    def rows(self, x, at, dim):
        return jax.lax.dynamic_slice_in_dim(x, at[0] * self.block_q, self.block_q, dim)

    def keys(self, x, at, dim):
        return jax.lax.dynamic_slice_in_dim(x, at[1] * self.block_k, self.block_k, dim)

    def put_rows(self, x, part, at, dim):
        return jax.lax.dynamic_update_slice_in_dim(x, part, at[0] * self.block_q, dim)

    def add_rows(self, x, part, at):
        return self.put_rows(x, self.rows(x, at, 1) + part, at, 1)

    def add_keys(self, x, part, at):
        return jax.lax.dynamic_update_slice_in_dim(x, self.keys(x, at, 1) + part, at[1] * self.block_k, 1)

    def add_bias(self, dbias, part, at):
        """`part` [b, k, g, t, s], summed over the dims that the bias does not have."""
        part = part.sum([dim for dim in range(5) if dbias.shape[dim] == 1], keepdims=True)
        start = [jnp.zeros_like(at[0])] * 5  # a plain 0 has 64 bits under jax_enable_x64
        for dim, block in ((3, self.block_q), (4, self.block_k)):
            if dbias.shape[dim] > 1:
                start[dim] = at[dim - 3] * block
        here = jax.lax.dynamic_slice(dbias, start, part.shape)
        return jax.lax.dynamic_update_slice(dbias, here + part, start)

    def padded_rows(self, x, dim=1):
        return _padded(x, self.block_q, dim)

    def _padded_keys(self, x, dim):
        return _padded(x, self.block_k, dim)


def _padded(x: jax.Array, block: int, dim: int) -> jax.Array:
    extra = -x.shape[dim] % block
    return jnp.pad(x, [(0, extra if at == dim else 0) for at in range(x.ndim)]) if extra else x


def _kept(x: jax.Array, kept: jax.Array) -> jax.Array:
    """x [b, time, ...] where kept [b or 1, time], else 0."""
    return jnp.where(kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), x, 0)
