"""Cuts tokens into chunks, so that at most one chunk's logits exist at a time.

Of n chunks, chunk i takes the times i, i + n, i + 2n, ...: a time dim that is split over devices
stays split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

CHUNK_LOGITS = 2**26  # of a chunk at most: 256 MiB in float32


def chunk_count(batch: int, time: int, vocab: int, limit: int) -> int:
    """Returns the fewest chunks of `time`, equal if possible, of at most `limit` logits each.

    A chunk has at least one time step. If no number from the fewest to twice that divides `time`,
    it is the fewest, and `time` must be padded.
    """
    least = min(-(-batch * time * vocab // limit), time)
    for count in range(least, 2 * least + 1):
        if time % count == 0:
            return count
    return least


def pad_time(chunks: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns [b, t, ...] with zeros appended, so that `chunks` divide the times."""
    padding = -arrays[0].shape[1] % chunks
    if not padding:
        return arrays
    return tuple(jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in arrays)


def cut(chunks: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Reshapes [b, t, ...] to [chunks, b, t / chunks, ...]."""

    def cut_one(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunks, *x.shape[2:]), 2, 0)

    return tuple(cut_one(x) for x in arrays)


def sum_over_chunks(
    of_chunk: Callable[..., tuple[Any, Any]], chunks: Sequence[jax.Array]
) -> tuple[Any, Any]:
    """Returns the sum over the chunks of what `of_chunk(*arrays)` returns first, and the others
    [chunks, ...]; both are trees. `chunks`: arrays as `cut` returns them.

    The first chunk begins the sum. Zeros in its place would be written and read again: for the
    gradient of a weight as many as it has elements.
    """

    def step(total, arrays):
        more, other = of_chunk(*arrays)
        return jax.tree.map(jnp.add, total, more), other

    total, first = of_chunk(*(each[0] for each in chunks))
    if chunks[0].shape[0] == 1:
        return total, jax.tree.map(lambda x: x[None], first)
    total, others = jax.lax.scan(step, total, [each[1:] for each in chunks])
    return total, jax.tree.map(lambda x, more: jnp.concatenate((x[None], more)), first, others)


def join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reverses `cut`: [chunks, b, t / chunks, ...] -> [b, t, ...]; `shape` is (b, t)."""
    return jnp.moveaxis(x, 0, 2).reshape(*shape, *x.shape[3:])
