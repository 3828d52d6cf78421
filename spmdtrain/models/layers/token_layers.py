"""Defines the embeddings that each layer has of its own, and what it adds to the stream from them.

Letters in addition to those of this room: l layers, p channels that a layer reads of a token.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mlp_activations import gated_gelu, gated_silu
from spmdtrain.models.layers.norm import Norm, norm_scale, rms_normed
from spmdtrain.models.layers.weights import hidden_std, matmul_weight, recomputed, weight
from spmdtrain.models.scaled import scaled

PART = "token_layers"  # what layers read of `ForwardContext.read`
OF_TOKENS = ("batch", "time", None)
GATES = {"geglu": gated_gelu, "swiglu": gated_silu}


class TokenLayers(nnx.Module):
    """The channels that all layers read of each token: rows of a table, and a projection of the
    token's embedding, which is what the first layer gets.
    """

    any_order = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        settings = config.token_layers
        assert settings is not None, "a model with [model.token_layers]"
        self.layers, self.dim, self.epsilon = config.layers, settings.dim, config.norm_epsilon
        self.offset = config.norm_offset
        width = config.layers * settings.dim
        rows = settings.vocab or config.vocab
        assert rows is not None, "a model with a vocabulary"
        self.table_vf = weight(rngs, (rows, width), ("vocab", "embed"))
        std = hidden_std(config)
        self.project_ef = matmul_weight(rngs, (config.embed, width), ("embed", "rank"), std)
        self.scale_p = norm_scale(config, settings.dim, "norm")

    @part("embedding")
    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> ForwardContext:
        """Returns the context of the layers, with the channels of all of them [l, b, t, p].

        `x_bte`: the embeddings, with their factor.
        """
        assert ctx.ids_bt is not None, "a context with the ids of tokens"
        shape = (*ctx.ids_bt.shape, self.layers, self.dim)
        projected = ctx.column_parallel(x_bte, self.project_ef, (None,))
        projected = scaled(projected.reshape(shape), x_bte.shape[-1] ** -0.5)
        scale_p = self.scale_p[...].astype(jnp.float32) + self.offset
        projected = rms_normed(projected, scale_p, (3,), self.epsilon, ctx)
        rows = ctx.constrain(ctx.lookup(self.table_vf[...], ctx.ids_bt), *OF_TOKENS)
        # In its dtype, like Gemma's training.
        factor = jnp.asarray(self.dim**0.5, rows.dtype).astype(jnp.float32)
        rows = scaled(rows.reshape(shape), factor)
        both = jnp.moveaxis(scaled(projected + rows, 2**-0.5), 2, 0)
        return replace(ctx, read={**ctx.read, PART: ctx.constrain(both, None, *OF_TOKENS)})


class TokenPart(nnx.Module):
    """The projection of a layer's own channels of a token, times a gate, which is normed and added
    to the stream.
    """

    any_order = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        settings = config.token_layers
        assert settings is not None, "a model with [model.token_layers]"
        self.activation = config.mlp
        std = hidden_std(config)
        out_std = std * (2 * config.layers) ** -0.5
        self.gate_ep = matmul_weight(rngs, (config.embed, settings.dim), ("embed", "rank"), std)
        back_axes = ("rank", "embed")
        self.out_pe = matmul_weight(rngs, (settings.dim, config.embed), back_axes, out_std)
        self.norm = Norm(config)

    @part("mlp")
    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns the stream with the projection added."""
        assert ctx.layer is not None, "a layer with a number"
        own_btp = jax.lax.dynamic_index_in_dim(ctx.read[PART], ctx.layer, keepdims=False)
        gate_btp = ctx.column_parallel(x_bte, self.gate_ep, (None,))
        h_btp = recomputed(GATES[self.activation], ctx)(gate_btp, own_btp)
        return x_bte + self.norm(ctx.row_parallel(h_btp, self.out_pe, (None,)), ctx)
