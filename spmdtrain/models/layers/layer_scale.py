"""Defines the number by which a layer multiplies the stream at its end."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.models.buffer import Buffer
from spmdtrain.models.context import ForwardContext


class LayerScale(nnx.Module):
    """A number of each layer that multiplies the whole stream; it is not trained."""

    any_order = True

    def __init__(self):
        self.scale = Buffer(jnp.ones(1), out_sharding=(None,))

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:  # noqa: ARG002 - as others
        return x_bte * self.scale[...].astype(x_bte.dtype)
