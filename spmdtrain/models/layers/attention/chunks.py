"""Keeps attention within blocks of positions: tokens of one block are numbered as one segment.

So every implementation of attention that knows documents knows blocks, on any mesh.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spmdtrain.models.layers.kinds import kind_of
from spmdtrain.models.size import seen_pairs


def block_ids(
    chunks: Sequence[int],
    number: jax.Array | int | None,
    positions_bt: jax.Array,
    segment_ids_bt: jax.Array | None = None,
    longest: int = 0,
) -> jax.Array:
    """Returns the segments [b, t] of tokens in layer `number`: blocks of documents, int32.

    `chunks`: for each layer the tokens of a block, 0 for none. `longest`: positions of a document.
    """
    sizes = list(dict.fromkeys(chunks))
    size: jax.Array | int = sizes[0]
    if len(sizes) > 1:
        size = jnp.array(sizes, jnp.int32)[kind_of(chunks, number)]
    block_bt = jnp.where(jnp.equal(size, 0), 0, positions_bt // jnp.maximum(size, 1))
    if segment_ids_bt is None:
        return block_bt
    assert longest, "the longest document, whose blocks are numbered"
    blocks = -(-longest // min(size for size in sizes if size))
    return segment_ids_bt * blocks + block_bt


def share_of_window(length: int, chunk: int) -> float:
    """Returns the pairs within blocks of `chunk` tokens over those within a window as long."""
    if chunk >= length:
        return 1.0
    return seen_pairs(length, chunk=chunk) / seen_pairs(length, window=chunk)
