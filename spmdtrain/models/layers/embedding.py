"""Defines the embedding table of tokens."""

import jax
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.weights import weight


class Embedding(nnx.Module):
    """A table with a row per id, whose vocabulary may be split over devices."""

    any_order = True

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        self.table_ve = weight(rngs, (vocab, width), ("vocab", "embed"))

    @part("embedding")
    def __call__(self, ids_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        return ctx.lookup(self.table_ve[...], ids_bt)
