"""Cuts tokens into chunks, so that at most one chunk's logits exist at a time.

Of n chunks, chunk i takes the times i, i + n, i + 2n, ...: a time dim that is split over devices
stays split.
"""

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


def join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reverses `cut`: [chunks, b, t / chunks, ...] -> [b, t, ...]; `shape` is (b, t)."""
    return jnp.moveaxis(x, 0, 2).reshape(*shape, *x.shape[3:])
