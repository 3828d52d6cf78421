"""Runs the recurrence of linear-time mixers by chunks of tokens.

A head has a state S [k, v], which is 0 at the start of a document. Each token does

    S <- decay S;   u = rate (v - S^T k);   S <- S + k u^T;   o = S^T q

with one decay for the head (the gated delta rule, arXiv:2412.06464) or one for each key channel
(Kimi Delta Attention, arXiv:2510.26692). Without the correction - S^T k it is the state-space
duality of Mamba-2 (arXiv:2405.21060), where heads of a group share keys and queries.

In a chunk, where G_i is the sum of log decays up to token i, and S the state in front:

    A_ij = k_i . k_j exp(G_i - G_j) for i > j,    P_ij = q_i . k_j exp(G_i - G_j) for i >= j
    T = (I + diag(rate) A)^-1 diag(rate),    N = T V - T (K exp(G)) S
    O = (Q exp(G)) S + P N,    S' = exp(G_last) S + (K exp(G_last - G))^T N

Without the correction T is diag(rate), and N = T V. The start of a document inside a chunk is a
mask: tokens read only those of their own document, and S only before the first start.

Products that need no state are computed for a block of chunks at once; only N and S' go from chunk
to chunk, in `scan_chunks`. The backward pass keeps the state in front of each block, and computes
all else again, so it needs no memory in proportion to the tokens beyond that of inputs, outputs and
a few states.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.inverse import unit_inverse
from pallas_kernels.recurrence import Chunks, scan_chunks
from pallas_kernels.recurrence.products import product
from spmdtrain.models.layers.mixers.decayed_products import decayed_products, masked_exp

CHUNK = 64  # tokens of a chunk, a power of 2
BLOCK = 16  # chunks of a block


class Tokens(NamedTuple):
    """The numbers of each token that the recurrence reads."""

    q: jax.Array  # [b, t, h, k]
    k: jax.Array  # [b, t, h, k]
    v: jax.Array  # [b, t, h, r, v]
    log_decay: jax.Array  # float32 [b, t, h, r, k], or 1 in place of k: one for all channels
    rate: jax.Array  # float32 [b, t, h, r]
    starts: jax.Array  # bool [b, t]: the first token of a document


HEADS = (1, 1, 2, 2, 2, 0)  # how many dims of heads each of them has


def recur(
    tokens: Tokens, state_bhrkv: jax.Array, *, corrects: bool, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs o [b, t, h, r, v], and the float32 state behind the last token.

    `corrects`: with the correction by what the state holds. Matmuls round their factors to the
    dtype of v; decays, their sums, the inverse and the state are in float32. `chunk`: at most so
    many tokens in a chunk, a power of 2.
    """
    batch, count = tokens.starts.shape
    blocks, size = in_blocks(tokens, chunk)
    run = partial(_run_block, corrects=corrects, size=size)
    if blocks.starts.shape[0] == 1:
        state, o = run(state_bhrkv, jax.tree.map(lambda x: x[0], blocks))
    else:
        state, o = jax.lax.scan(jax.checkpoint(run, prevent_cse=False), state_bhrkv, blocks)
        o = jnp.moveaxis(o, 0, 1)
    return o.reshape(batch, -1, *tokens.v.shape[2:])[:, :count], state


def in_blocks(tokens: Tokens, chunk: int) -> tuple[Tokens, int]:
    """Returns the tokens in blocks of whole chunks, with a leading dim of blocks, and the size of a
    chunk.

    Tokens that are added at the end leave the state as it is.
    """
    batch, count = tokens.starts.shape
    size = min(chunk, 1 << (count - 1).bit_length())
    chunks = -(-count // size)
    blocks = -(-chunks // BLOCK)
    of_block = -(-chunks // blocks) * size
    more = blocks * of_block - count

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, blocks, of_block, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, tokens), size


def _run_block(
    state: jax.Array, tokens: Tokens, *, corrects: bool, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the state behind a block of chunks of `size` tokens, and its outputs."""
    dtype = tokens.v.dtype
    chunks = chunks_of(tokens, corrects=corrects, size=size)
    o, state = scan_chunks(chunks, state)
    o_bcihrv = jnp.moveaxis(o.astype(dtype), (1, 0, 4), (0, 1, 2))
    return state, o_bcihrv.reshape(tokens.v.shape)


def chunks_of(tokens: Tokens, *, corrects: bool, size: int) -> Chunks:
    """Returns the chunks [c, b, h, r, ...] of a block of tokens: all that needs no state."""
    dtype = tokens.v.dtype
    q, k, v, log_decay, rate, starts = (
        _by_chunk(x, heads, size) for x, heads in zip(tokens, HEADS, strict=True)
    )
    number = jnp.cumsum(starts, -1, dtype=jnp.int32)  # of the document within the chunk
    is_of_state = (number == 0)[..., None, None, :, None]
    is_of_last = (number == number[..., -1:])[..., None, None, :, None]
    places = jnp.arange(size)
    sees = (number[..., None] == number[..., None, :]) & (places[:, None] >= places)
    # Sums begin anew with a document: no bit of it depends on those in front.
    total = product("...ij,...jk->...ik", sees[:, :, None, None], log_decay, jnp.float32)
    last = total[..., -1:, :]
    lead = jnp.where(is_of_state, jnp.exp(total), 0)
    trail = masked_exp(last - total, is_of_last)
    decay = jnp.where(is_of_state[..., -1:, :], jnp.exp(last), 0)
    q_of_group, k_of_group = (x[..., None, :, :].astype(jnp.float32) for x in (q, k))
    led_k = k_of_group * lead
    if corrects:
        inner, among_keys = decayed_products((q, k), k, total, sees, dtype)
        inverse = unit_inverse(jnp.tril(rate[..., None] * among_keys, -1)) * rate[..., None, :]
        new = product("...ij,...jv->...iv", inverse, v, dtype)
        erase = product("...ij,...jk->...ik", inverse, led_k, dtype).astype(dtype)
    else:
        (inner,) = decayed_products((q,), k, total, sees, dtype)
        new, erase = rate[..., None] * v.astype(jnp.float32), None
    return Chunks(
        decay=decay[..., 0, :],  # exp(G_last)
        write=(k_of_group * trail).astype(dtype),  # K exp(G_last - G)
        new=new,  # T V
        erase=erase,  # T (K exp(G))
        read=(q_of_group * lead).astype(dtype),  # Q exp(G)
        inner=inner.astype(dtype),  # P
    )


def _by_chunk(x: jax.Array, heads: int, size: int) -> jax.Array:
    """Returns x [b, t, *heads, *channels] as [c, b, *heads, i, *channels]; `heads` counts dims."""
    cut = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(cut, (1, 2), (0, 2 + heads))
