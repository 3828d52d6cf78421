"""Defines attention whose values are normed, or are the projected keys."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.grouped import Attention, Heads
from spmdtrain.models.layers.weights import recomputed


class OwnValues(Attention):
    """Grouped-query attention as in Gemma 4.

    With `model.value_norm` the values of each head are divided by their root mean square, without a
    weight. With `model.full.keys_are_values` there is no projection to values: they are the
    projected keys, before the norm and rotation of keys.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.are_keys = config.full is not None and config.full.keys_are_values
        self.epsilon = config.norm_epsilon if config.value_norm else None
        super().__init__(config, rngs, projects="qk" if self.are_keys else "qkv")

    @property
    def any_order(self) -> bool:
        """True: tokens may come in any order, with their positions."""
        return True

    def _reads_in_place(self, ctx: ForwardContext) -> bool:
        return self.epsilon is None and super()._reads_in_place(ctx)

    def _project(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns what `Attention` does; the slot of keys is also that of values."""
        slots_btknd = super()._project(x_bte, ctx)
        if not self.are_keys:
            return slots_btknd
        return jnp.concatenate((slots_btknd, slots_btknd[..., -1:, :]), -2)

    def _bias(self, slots_btknd: jax.Array) -> jax.Array | None:
        """Returns what `Attention` does; the bias of keys is also that of values."""
        bias_knd = super()._bias(slots_btknd)
        if bias_knd is None or not self.are_keys:
            return bias_knd
        return jnp.concatenate((bias_knd, bias_knd[:, -1:]), 1)

    def _heads(self, qkv_btknd: jax.Array, ctx: ForwardContext) -> Heads:
        """Returns what `Attention` does, with normed values."""
        q, k, v, gate = super()._heads(qkv_btknd, ctx)
        if self.epsilon is not None:
            v = recomputed(_unit, ctx, static_argnums=(1,))(v, self.epsilon)
        return q, k, v, gate


def _unit(x: jax.Array, epsilon: float) -> jax.Array:
    """Returns x divided by the root mean square of its last dim, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)).astype(
        x.dtype
    )
