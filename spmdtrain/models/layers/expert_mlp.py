"""Defines the mlp of a layer with experts: a router, its experts, and any that all tokens share.

Letters in addition to those of this room: x experts, k chosen experts of a token, u the dims of an
mlp's first projection: f, or 2 and f with a gate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mlp import Mlp
from spmdtrain.models.layers.mlp_activations import ACTIVATIONS
from spmdtrain.models.layers.norm import MakeNorm, Norm, normed
from spmdtrain.models.layers.router import TOKEN, Router
from spmdtrain.models.layers.weights import INIT_STD, hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import FullPrecision
from spmdtrain.parallel.experts.expert_weights import ExpertWeights


class ExpertMlp(nnx.Module):
    """Several mlps in place of `Mlp`; each token goes through a few of them.

    With a width of their own, as in Nemotron 3 Super, they work between two projections of it. With
    norms of their own, as in Gemma 4, which `norm(config)` makes, they read the stream itself.

    Returns the weighted sum of their outputs, and the side losses of the router. Tokens travel to
    the devices that own their experts; weights stay where they are (`parallel/experts`).
    """

    any_order = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, *, norm: MakeNorm = Norm):
        assert config.experts is not None, "a model with experts"
        self.reads_stream = config.experts.own_norms
        self.activation = config.mlp
        self.gate_input = config.experts.gate_input
        count, hidden = config.experts.count, config.experts.ffn
        self.router = Router(config, rngs)
        gate = (2,) if config.is_gated else ()
        up_shape = (*gate, hidden)
        up_axes = (*(None for _ in gate), "ffn")
        std = hidden_std(config)
        down_std = std * (2 * config.layers) ** -0.5
        width = config.expert_width
        self.up_xeu = matmul_weight(
            rngs, (count, width, *up_shape), ("experts", "embed", *up_axes), std
        )
        self.down_xfe = matmul_weight(
            rngs, (count, hidden, width), ("experts", "ffn", "embed"), down_std
        )
        if config.mlp_bias:
            self.up_bias = _zeros((count, *up_shape), ("experts", *up_axes))
            self.down_bias = _zeros((count, width), ("experts", "norm"))
        else:
            self.up_bias = None
            self.down_bias = None
        shared_width = config.experts.shared_width
        self.shared = Mlp(config, rngs, shared_width) if shared_width else None

        def own_norm(place: str) -> nnx.Module | None:
            has_one = self.reads_stream and config.norm_places in (place, "both")
            return norm(config) if has_one else None

        self.norm, self.out_norm = own_norm("before"), own_norm("after")
        self.shared_norm, self.shared_out_norm = own_norm("before"), own_norm("after")
        has_gate = config.experts.shared_gate
        self.shared_gate_e1 = _shared_gate(config, rngs) if has_gate else None
        into, back = (config.embed, width), (width, config.embed)
        is_narrow = config.experts.width is not None
        of_in, of_out = ("embed", "rank"), ("rank", "embed")
        self.narrow_in_el = matmul_weight(rngs, into, of_in, std) if is_narrow else None
        self.narrow_out_le = matmul_weight(rngs, back, of_out, std) if is_narrow else None

    @part("mlp")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        routing = self.router(x_bte, ctx)
        weights = ExpertWeights(
            self.up_xeu[...], self.down_xfe[...], _array(self.up_bias), _array(self.down_bias)
        )
        activation = recomputed(ACTIVATIONS[self.activation], ctx)
        read_bte = normed(self.norm, x_bte, ctx)
        if self.narrow_in_el is not None:
            read_bte = ctx.column_parallel(read_bte, self.narrow_in_el, (None,))
            read_bte = ctx.constrain(read_bte, *TOKEN, None)
        gates_btk, ids_btk = routing.gates_btk, routing.ids_btk
        experts = partial(ctx.experts, weights=weights, activation=activation)
        if self.gate_input:
            y_bte = _of_gated_inputs(experts, read_bte, gates_btk, ids_btk)
        else:
            y_bte = experts(read_bte, gates_btk, ids_btk)
        if self.narrow_out_le is not None:
            y_bte = ctx.constrain(y_bte, "batch", "time", None)
            y_bte = ctx.row_parallel(y_bte, self.narrow_out_le, (None,))
        y_bte = normed(self.out_norm, y_bte, ctx)
        if self.shared is not None:
            shared_bte = self._of_shared(normed(self.shared_norm, x_bte, ctx), ctx, self.shared)
            y_bte = y_bte + normed(self.shared_out_norm, shared_bte, ctx)
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


def _of_gated_inputs(
    experts: Callable[..., jax.Array], x_bte: jax.Array, gates_btk: jax.Array, ids_btk: jax.Array
) -> jax.Array:
    """Returns the sum over a token's choices of the expert's output for x times the gate."""
    total = jnp.zeros(x_bte.shape, jnp.float32)
    for choice in range(ids_btk.shape[-1]):
        one = slice(choice, choice + 1)
        gate_bt1 = gates_btk[..., one]
        gated_bte = (x_bte.astype(jnp.float32) * gate_bt1).astype(x_bte.dtype)
        total = total + experts(gated_bte, jnp.ones_like(gate_bt1), ids_btk[..., one])
    return total.astype(x_bte.dtype)


def _shared_gate(config: TransformerConfig, rngs: nnx.Rngs) -> FullPrecision:
    """Draws the weight from the stream to the gate of the shared experts, like a router's."""
    std = INIT_STD / config.width_factor
    drawn = std * jax.random.normal(rngs.params(), (config.embed, 1))
    return FullPrecision(drawn, out_sharding=("embed", None))


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=axes)


def _array(bias: Any) -> jax.Array | None:
    return None if bias is None else bias[...]
