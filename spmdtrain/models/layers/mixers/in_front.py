"""Finds what lies in front of the pieces of a sequence on this device: inputs, and the state.

A piece changes the state by an affine map, S' = M S + N, where M = 0 if a document begins in it. So
every device computes the map of each of its pieces, all are gathered, and their composition up to a
piece gives the state in front of it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.recurrence import state_behind
from spmdtrain.models.layers.mixers.document_starts import DocumentStarts
from spmdtrain.models.layers.mixers.recurrence import CHUNK, Tokens, chunks_of, in_blocks
from spmdtrain.parallel.context.sequence_pieces import Pieces


def inputs_in_front(pieces: Pieces, x_btn: jax.Array, documents: DocumentStarts) -> jax.Array:
    """Returns the inputs [b, w, ...] in front of each piece; those of other documents are 0."""
    is_same_bw = documents.is_same_bw
    before_bwn = pieces.in_front(x_btn, is_same_bw.shape[1])
    return jnp.where(jnp.expand_dims(is_same_bw, range(2, x_btn.ndim)), before_bwn, 0)


def state_in_front(pieces: Pieces, tokens: Tokens, *, corrects: bool) -> jax.Array:
    """Returns the state [b, h, r, k, v] in front of each piece of this device, rows of tokens."""
    rows, _, heads, keys = tokens.k.shape
    zero = jnp.zeros((rows, heads, tokens.v.shape[3], keys, tokens.v.shape[4]), jnp.float32)
    if pieces.count == 1:
        return zero
    factor, added = map_of(tokens, zero, corrects=corrects)

    def step(state: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        factor, added = piece
        return product_with(factor, state) + added, state

    maps = (pieces.gather(factor), pieces.gather(added))
    _, before = jax.lax.scan(step, zero[: rows // pieces.of_device], maps)
    return pieces.own(before)


def map_of(
    tokens: Tokens, zero: jax.Array, *, corrects: bool, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Returns M and N of all tokens, by which they change a state; `zero` is an empty one.

    M is a matrix [b, h, r, k, l], or without the correction a diagonal [b, h, r, k or 1]. The
    matrix is what the tokens do to the identity if they write nothing, so both are found by one
    pass over a state that has the identity as further columns.
    """
    blocks, size = in_blocks(tokens, chunk)
    keys, values = zero.shape[-2:]
    state = zero
    if corrects:
        identity = jnp.broadcast_to(jnp.eye(keys), (*zero.shape[:-1], keys))
        state = jnp.concatenate((zero, identity), -1)

    @jax.checkpoint
    def run_block(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, None]:
        chunks = chunks_of(tokens, corrects=corrects, size=size)
        columns = [(0, 0)] * (zero.ndim) + [(0, state.shape[-1] - values)]
        chunks = chunks._replace(new=jnp.pad(chunks.new, columns))
        return state_behind(chunks, state), None

    state, _ = jax.lax.scan(run_block, state, blocks)
    if corrects:
        return state[..., values:], state[..., :values]
    has_start = tokens.starts.any(1)[:, None, None, None]
    return jnp.where(has_start, 0, jnp.exp(tokens.log_decay.sum(1))), state


def product_with(factor: jax.Array, state: jax.Array) -> jax.Array:
    """Returns M S of M, a matrix or a diagonal, and the state S."""
    if factor.ndim < state.ndim:
        return factor[..., None] * state
    return jnp.matmul(factor, state, precision="highest")
