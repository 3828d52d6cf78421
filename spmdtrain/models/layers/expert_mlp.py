"""Defines the mlp of a layer with experts: a router, its experts, and any that all tokens share.

Letters in addition to those of this room: x experts, k chosen experts of a token, u the dims of an
mlp's first projection: f, or 2 and f with a gate.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mlp import ACTIVATIONS, Mlp
from spmdtrain.models.layers.router import Router
from spmdtrain.models.layers.weights import hidden_std, matmul_weight, recomputed
from spmdtrain.parallel.experts.expert_weights import ExpertWeights


class ExpertMlp(nnx.Module):
    """Several mlps in place of `Mlp`; each token goes through a few of them.

    Returns the weighted sum of their outputs, and the side losses of the router. Tokens travel to
    the devices that own their experts; weights stay where they are (`parallel/experts`).
    """

    any_order = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        assert config.experts is not None, "a model with experts"
        self.activation = config.mlp
        count, hidden = config.experts.count, config.experts.ffn
        self.router = Router(config, rngs)
        gate = (2,) if config.is_gated else ()
        up_shape = (*gate, hidden)
        up_axes = (*(None for _ in gate), "ffn")
        std = hidden_std(config)
        down_std = std * (2 * config.layers) ** -0.5
        self.up_xeu = matmul_weight(
            rngs, (count, config.embed, *up_shape), ("experts", "embed", *up_axes), std
        )
        self.down_xfe = matmul_weight(
            rngs, (count, hidden, config.embed), ("experts", "ffn", "embed"), down_std
        )
        if config.mlp_bias:
            self.up_bias = _zeros((count, *up_shape), ("experts", *up_axes))
            self.down_bias = _zeros((count, config.embed), ("experts", "norm"))
        else:
            self.up_bias = None
            self.down_bias = None
        shared = config.experts.shared
        self.shared = Mlp(config, rngs, shared * hidden) if shared else None

    @part("mlp")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        routing = self.router(x_bte, ctx)
        weights = ExpertWeights(
            self.up_xeu[...], self.down_xfe[...], _array(self.up_bias), _array(self.down_bias)
        )
        activation = recomputed(ACTIVATIONS[self.activation], ctx)
        y_bte = ctx.experts(
            x_bte, routing.gates_btk, routing.ids_btk, weights, activation=activation
        )
        if self.shared is not None:
            y_bte = y_bte + self.shared(x_bte, ctx)
        return y_bte, routing.side_losses


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=axes)


def _array(bias: Any) -> jax.Array | None:
    return None if bias is None else bias[...]
