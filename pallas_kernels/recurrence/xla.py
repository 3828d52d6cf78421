"""Implements the scan over chunks in plain JAX: two small matmuls after another, a chunk at a time.

What tokens read from the states in front of their chunks is computed for all chunks at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.calls import ChunksCall
from pallas_kernels.choose import not_interpretable
from pallas_kernels.recurrence.chunks import Chunks
from pallas_kernels.recurrence.products import product


def refusal(call: ChunksCall, interpreted: bool) -> str:  # noqa: ARG001
    return not_interpretable(interpreted)


def scan_chunks(chunks: Chunks, state: jax.Array, name: str):  # noqa: ARG001
    """Returns the float32 outputs [c, ..., i, v], and the state behind the last chunk."""
    state, (before, values) = jax.lax.scan(_make_step(chunks.write.dtype), state, chunks)
    return outputs(chunks, before, values), state


def state_behind(chunks: Chunks, state: jax.Array, name: str):  # noqa: ARG001
    """Returns the state behind the last chunk."""
    step = _make_step(chunks.write.dtype)
    return jax.lax.scan(lambda state, chunk: (step(state, chunk)[0], None), state, chunks)[0]


def outputs(chunks: Chunks, before: jax.Array, values: jax.Array) -> jax.Array:
    """Returns what tokens read from the states `before` their chunks and from `values` in them."""
    dtype = chunks.write.dtype
    o = product("...ik,...kv->...iv", chunks.read, before, dtype)
    return o + product("...ij,...jv->...iv", chunks.inner, values, dtype)


def _make_step(dtype: jnp.dtype) -> Callable:
    """Returns the body of the scan: the state behind a chunk, and (state in front, N)."""

    def step(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        new = chunk.new
        if chunk.erase is not None:
            new = new - product("...ik,...kv->...iv", chunk.erase, state, dtype)
        written = product("...ik,...iv->...kv", chunk.write, new, dtype)
        return chunk.decay[..., None] * state + written, (state, new)

    return step
