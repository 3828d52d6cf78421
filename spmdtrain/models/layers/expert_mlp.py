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
from spmdtrain.models.layers.weights import INIT_STD, hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import FullPrecision
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
        width = config.experts.shared_width
        self.shared = Mlp(config, rngs, width) if width else None
        has_gate = config.experts.shared_gate
        self.shared_gate_e1 = _shared_gate(config, rngs) if has_gate else None

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
            y_bte = y_bte + self._of_shared(x_bte, ctx, self.shared)
        return y_bte, routing.side_losses

    def _of_shared(self, x_bte: jax.Array, ctx: ForwardContext, shared: Mlp) -> jax.Array:
        """Returns the output of the shared experts, times their gate if they have one."""
        y_bte = shared(x_bte, ctx)
        if self.shared_gate_e1 is None:
            return y_bte
        highest = jax.lax.Precision.HIGHEST
        gate_e1 = self.shared_gate_e1[...].astype(jnp.float32)
        x_f32 = x_bte.astype(jnp.float32)
        gate_bt1 = jnp.einsum("bte,ex->btx", x_f32, gate_e1, precision=highest)
        return (y_bte * jax.nn.sigmoid(gate_bt1)).astype(y_bte.dtype)


def _shared_gate(config: TransformerConfig, rngs: nnx.Rngs) -> FullPrecision:
    """Draws the weight from the stream to the gate of the shared experts, like a router's."""
    std = INIT_STD / config.width_factor
    drawn = std * jax.random.normal(rngs.params(), (config.embed, 1))
    return FullPrecision(drawn, out_sharding=("embed", None))


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=axes)


def _array(bias: Any) -> jax.Array | None:
    return None if bias is None else bias[...]
