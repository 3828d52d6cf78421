"""Keeps the indexers of sparse attention, which nothing computes with.

Letters in addition to those of this room: n layers with an indexer, r the latent of queries, h
heads of an indexer, c channels of a head.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.buffer import Buffer


class Indexers(nnx.Module):
    """The indexers of all layers that have one, and of the blocks after the last layer.

    They are buffers: a run stores them on its mesh and in checkpoints, and trains none of them.
    """

    any_order = True

    def __init__(self, config: TransformerConfig):
        indexer, latent = config.indexer, config.latent
        assert indexer is not None, "a model with [model.indexer]"
        assert latent is not None, "the settings ask for [model.latent]"
        count, (heads, dim) = len(config.indexer_layers), (indexer.heads, indexer.dim)
        rank, embed = latent.query_rank or config.embed, config.embed
        self.query_nrhc = _buffer((count, rank, heads, dim), (None, "latent", None, None))
        self.key_nec = _buffer((count, embed, dim), (None, "embed", None))
        self.key_scale_nc = _buffer((count, dim), (None, None))
        self.key_bias_nc = _buffer((count, dim), (None, None))
        self.weight_neh = _buffer((count, embed, heads), (None, "embed", None))


def _buffer(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Buffer:
    zeros: jax.Array = jnp.zeros(shape)
    return Buffer(zeros, out_sharding=axes)
