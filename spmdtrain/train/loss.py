"""Next-token cross-entropy, chunked over tokens: the logits of a large vocabulary never exist whole.

Letters: b batch, t time, e embed, v vocab.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

CHUNK_LOGITS = 2**26  # logits computed at once per data shard (256 MiB in float32) before more chunks are cut


def chunks_needed(batch: int, time: int, vocab: int, limit: int = CHUNK_LOGITS) -> int:
    """The smallest number of equal chunks of `time` with at most `limit` logits each (one token at least)."""
    return next(n for n in range(1, time + 1) if time % n == 0 and (batch * (time // n) * vocab <= limit or n == time))


def cross_entropy(
    hidden_bte: jax.Array,
    table_ve: jax.Array,
    targets_bt: jax.Array,
    mask_bt: jax.Array,
    place: Callable[..., jax.Array] = lambda x, *_: x,
    limit: int = CHUNK_LOGITS,
    split: tuple[str, ...] = (),
) -> jax.Array:
    """Sum over unmasked tokens of -log softmax(hidden table^T)[target], in float32.

    `split`: manual mesh axes that the rows of the table are split over; each device has its share of the logits.

    Chunk i takes the tokens i, i + n, i + 2n, ... so that a time dim split over `context` stays split. Each chunk's
    logits are recomputed in the backward pass.
    """
    batch, time, width = hidden_bte.shape
    chunks = chunks_needed(batch, time, table_ve.shape[0], limit)
    if chunks == 1:
        return _sum_of_chunk(hidden_bte, table_ve, targets_bt, mask_bt, place, split)

    def cut(x):
        return jnp.moveaxis(x.reshape(batch, time // chunks, chunks, *x.shape[2:]), 2, 0)

    @jax.checkpoint
    def body(total, chunk):
        hidden, targets, mask = chunk
        hidden = place(hidden, "batch", "time", "embed")
        return total + _sum_of_chunk(hidden, table_ve, targets, mask, place, split), None

    total, _ = jax.lax.scan(body, jnp.float32(0), (cut(hidden_bte), cut(targets_bt), cut(mask_bt)))
    return total


def _sum_of_chunk(hidden_bte, table_ve, targets_bt, mask_bt, place, split):
    logits = jnp.einsum("bte,ve->btv", hidden_bte, table_ve, preferred_element_type=jnp.float32)
    logits = place(logits, "batch", "time", "vocab")
    # A masked sum, not a gather: it stays local where the vocabulary is split.
    first = jax.lax.axis_index(split) * logits.shape[-1] if split else 0
    hit = first + jnp.arange(logits.shape[-1]) == targets_bt[..., None]
    target = jnp.sum(jnp.where(hit, logits, 0), -1)
    if not split:
        return jnp.sum((jax.nn.logsumexp(logits, -1) - target) * mask_bt)
    largest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), split)
    total, target = jax.lax.psum((jnp.exp(logits - largest[..., None]).sum(-1), target), split)
    return jnp.sum((jnp.log(total) + largest - target) * mask_bt)
