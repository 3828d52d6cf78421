"""`linear_likeliest`: the likeliest next tokens, a chunk of tokens at a time.

Letters: b sequences, t time, v rows of the table on this device, k likeliest tokens.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.loss.api import einsum_in_float32, shape_logits
from pallas_kernels.loss.chunks import CHUNK_LOGITS, chunk_count, cut, join, pad_time
from pallas_kernels.loss.student import Head, first_row


def linear_likeliest(
    head: Head,
    *,
    top: int,
    temperature: float,
    vocab: int,
    axis_name: tuple[str, ...] = (),
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """Returns the ids [b, t, k] of the `top` likeliest tokens, and log-probabilities [b, t, k + 1].

    Ids are int32, likeliest first. Log-probabilities are float32, of the softmax of the logits over
    the temperature; the last is that of all other tokens together. Both are whole on every device.

    Args:
      top: at most `vocab`.
      vocab: rows of the table that count, from the first, over all devices.
      axis_name: mesh axes that split the rows of the table, inside a shard_map that is manual over
        them.
      chunk_logits: at most this many logits exist at once, but at least those of one time step.
    """
    batch, time, _ = head.x.shape
    rows = head.weight.shape[0]
    chunks = chunk_count(batch, time, rows, chunk_logits)
    row = jnp.arange(rows) + first_row(axis_name, rows)

    def of_chunk(_, x_bte):
        logits_btv = einsum_in_float32("bte,ve->btv", x_bte, head.weight)
        logits_btv = shape_logits(logits_btv, head.scale, head.softcap) / temperature
        logits_btv = jnp.where(row < vocab, logits_btv, -jnp.inf)
        found_btk, places_btk = jax.lax.top_k(logits_btv, min(top, rows))
        ids_btk = row[places_btk]
        most_bt = found_btk[..., 0]
        if axis_name:
            most_bt = jax.lax.pmax(most_bt, axis_name)
        total_bt = jnp.exp(logits_btv - most_bt[..., None]).sum(-1)
        if axis_name:
            total_bt = jax.lax.psum(total_bt, axis_name)
            found_btk, ids_btk = (
                jax.lax.all_gather(each, axis_name, axis=2, tiled=True)
                for each in (found_btk, ids_btk)
            )
            found_btk, places_btk = jax.lax.top_k(found_btk, top)
            ids_btk = jnp.take_along_axis(ids_btk, places_btk, -1)
        below_btk = found_btk - most_bt[..., None]
        rest_bt = jnp.zeros_like(total_bt)
        if top < vocab:
            rest_bt = jnp.maximum(total_bt - jnp.exp(below_btk).sum(-1), 0)
        below_btk1 = jnp.concatenate([below_btk, jnp.log(rest_bt)[..., None]], -1)
        return None, (ids_btk, below_btk1 - jnp.log(total_bt)[..., None])

    (padded_bte,) = pad_time(chunks, head.x)
    _, found = jax.lax.scan(of_chunk, None, cut(chunks, padded_bte)[0])
    ids, logs = (join(each, padded_bte.shape[:2])[:, :time] for each in found)
    return ids, logs
