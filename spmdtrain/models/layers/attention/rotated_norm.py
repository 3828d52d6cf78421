"""Normalises queries and keys behind rotary positions, without weights, as Llama 4 does."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.kinds import kind_of
from spmdtrain.models.layers.weights import recomputed


@dataclass(frozen=True)
class RotatedNorm:
    """The RMSNorm of each head's queries and keys, in the layers that rotate them."""

    epsilon: float
    rotates: tuple[bool, ...]  # each layer

    def __call__(self, qk_btknd: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns queries and keys of the layer `ctx.layer`, normalised if it rotates them."""
        if not any(self.rotates):
            return qk_btknd
        normed = recomputed(_normed, ctx, static_argnums=(1,))(qk_btknd, self.epsilon)
        if all(self.rotates):
            return normed
        kinds = list(dict.fromkeys(self.rotates))
        return jnp.where(jnp.array(kinds)[kind_of(self.rotates, ctx.layer)], normed, qk_btknd)


def _normed(x: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype)


def make_rotated_norm(config: TransformerConfig) -> RotatedNorm:
    """Returns the norm behind the rotary positions of a model."""
    rotates = tuple(kind.rope_theta is not None for kind in config.layer_kinds)
    return RotatedNorm(config.norm_epsilon, rotates)
