"""Defines the scan over chunks: one after another, in the wider of their dtype and float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.recurrence.chunks import Chunks
from pallas_kernels.wide import widen


def scan_chunks(chunks: Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [c, ..., i, v], and the state [..., k, v] behind the last chunk."""
    state = widen(state)
    outputs = []
    for number in range(chunks.write.shape[0]):
        own: Chunks = jax.tree.map(lambda x, number=number: widen(x[number]), chunks)
        values = own.new
        if own.erase is not None:
            values = values - own.erase @ state
        outputs.append(own.read @ state + own.inner @ values)
        state = own.decay[..., None] * state + jnp.swapaxes(own.write, -1, -2) @ values
    return jnp.stack(outputs), state
