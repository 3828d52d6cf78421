"""Keeps the projections to keys and values of layers that read those of earlier layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.buffer import Buffer


class IdleKeys(nnx.Module):
    """The projections to a layer's own keys and values, their biases, and the norm of its keys.

    They are buffers, which nothing computes with: the layer shares keys and values of another.
    """

    any_order = True

    def __init__(self, config: TransformerConfig):
        width = config.kv_heads * config.head_dim
        has_values = not (config.full and config.full.keys_are_values)
        has_bias, has_norm = config.qkv_bias, config.query_norm == "head"
        self.key_ef = _buffer(config.embed, width)
        self.value_ef = _buffer(config.embed, width) if has_values else None
        self.key_bias_f = _buffer(width) if has_bias else None
        self.value_bias_f = _buffer(width) if has_bias and has_values else None
        self.key_scale_d = _buffer(config.head_dim) if has_norm else None


def _buffer(*shape: int) -> Buffer:
    zeros: jax.Array = jnp.zeros(shape)
    axes = ("embed", None) if len(shape) > 1 else (None,)
    return Buffer(zeros, out_sharding=axes)
