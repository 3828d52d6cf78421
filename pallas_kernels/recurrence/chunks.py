"""Defines what chunks of tokens do to a state.

Letters: c chunks, i and j tokens of a chunk, k key channels, v value channels, n heads.
"""

from math import prod
from typing import NamedTuple

import jax

from pallas_kernels.calls import ChunksCall


class Chunks(NamedTuple):
    """The arrays by which chunks change a state S [k, v] and read it; none of them needs the state.

    `...` are dims of sequences and heads. Arrays whose dtype is not given have that of `write`.
    """

    decay: jax.Array  # float32 [c, ..., k], or 1 in place of k: one decay for all channels
    write: jax.Array  # [c, ..., i, k]
    new: jax.Array  # float32 [c, ..., i, v]
    erase: jax.Array | None  # [c, ..., i, k]; None: what tokens write does not depend on S
    read: jax.Array  # [c, ..., i, k]
    inner: jax.Array  # [c, ..., i, j]


def call_of(chunks: Chunks) -> ChunksCall:
    """Returns the class of the call that scans these chunks."""
    count, *leading, tokens, keys = chunks.write.shape
    return ChunksCall(
        chunks=count,
        heads=prod(leading),
        tokens=tokens,
        key_dim=keys,
        value_dim=chunks.new.shape[-1],
        dtype=str(chunks.write.dtype),
        corrects=chunks.erase is not None,
        by_channel=chunks.decay.shape[-1] > 1,
    )
