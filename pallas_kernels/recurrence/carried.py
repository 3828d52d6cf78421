"""Scans over chunks with a kernel for each direction, which carries the state of every head.

What sums over value channels is left to matmuls of XLA over all chunks at once, for which the
kernels write the states, and the gradients of the states behind chunks: with the gradient D of a
state behind a chunk,

    dwrite = N D^T,   derase = -dN S^T

Letters as in chunks.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from pallas_kernels.recurrence.chunks import Chunks, call_of
from pallas_kernels.recurrence.products import product
from pallas_kernels.recurrence.xla import outputs


class Kernels(NamedTuple):
    """The kernels of an implementation; `name` is its own, with a variant.

    Arrays whose dtype is not given are float32.
    """

    # (name, state [n, k, v], decay, write, new, erase), each [c, n, ...] -> the state behind the
    # chunks, and in the dtype of `write` those in front [c, n, k, v] and N [c, n, i, v].
    forward: Callable
    # (name, gradient of the state behind, (decay, write, erase, states in front, N), gradients of
    # these two) -> the gradients of the first state, decay and new, and in the dtype of `write`
    # those of the states behind the chunks.
    backward: Callable


def scan_chunks(
    kernels: Kernels, chunks: Chunks, state: jax.Array, name: str
) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.scan_chunks` does."""
    state, before, values = _scan_heads(kernels, chunks, state, name)
    leading = chunks.new.shape[:-2]
    before, values = (x.reshape(*leading, *x.shape[2:]) for x in (before, values))
    return outputs(chunks, before, values), state


def state_behind(kernels: Kernels, chunks: Chunks, state: jax.Array, name: str) -> jax.Array:
    """Does what `xla.state_behind` does."""
    return _scan_heads(kernels, chunks, state, name)[0]


def _scan_heads(kernels: Kernels, chunks: Chunks, state: jax.Array, name: str):
    """Returns the state behind the chunks, the states in front [c, n, k, v], and N [c, n, i, v]."""
    count, heads = chunks.write.shape[0], call_of(chunks).heads

    def by_head(x: jax.Array, dims: int) -> jax.Array:
        return x.reshape(count, heads, *x.shape[x.ndim - dims :])

    last, before, values = _scan_compiled(
        kernels,
        name,
        state.reshape(heads, *state.shape[-2:]),
        by_head(chunks.decay, 1),
        by_head(chunks.write, 2),
        by_head(chunks.new, 2),
        None if chunks.erase is None else by_head(chunks.erase, 2),
    )
    return last.reshape(state.shape), before, values


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(kernels, name, state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik):
    return kernels.forward(name, state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik)


def _forward(kernels, name, state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik):
    results = kernels.forward(name, state_nkv, decay_cnk, write_cnik, new_cniv, erase_cnik)
    _, before, values = results
    return results, (decay_cnk, write_cnik, erase_cnik, before, values)


@partial(jax.jit, static_argnums=(0, 1), inline=True)  # jax 0.10 calls it outside any jit
def _backward(kernels, name, saved, gradients):
    _, write_cnik, erase_cnik, before, values = saved
    dlast, *others = gradients
    dtype = write_cnik.dtype
    dstate, ddecay, dnew, dafter = kernels.backward(name, dlast, saved, others)
    dwrite = product("cniv,cnkv->cnik", values, dafter, dtype).astype(dtype)
    derase = None
    if erase_cnik is not None:
        derase = -product("cniv,cnkv->cnik", dnew, before, dtype).astype(dtype)
    return dstate, ddecay, dwrite, dnew, derase


_scan.defvjp(_forward, _backward)
# Compiled once, also outside any jit.
_scan_compiled = jax.jit(_scan, static_argnums=(0, 1), inline=True)
