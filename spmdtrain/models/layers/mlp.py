"""Defines the mlp of a layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.bias import biased_gelu
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mlp_activations import ACTIVATIONS, XIELU_BETA, xielu
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import FullPrecision
from spmdtrain.models.scaled import scaled


class XieluSlopes(nnx.Module):
    """The two slopes of xIELU before softplus: above 0, and below, where 1/2 is added.

    At first both are 0.8, as in the paper.
    """

    any_order = True

    def __init__(self):
        self.alpha_p = FullPrecision(jnp.log(jnp.expm1(jnp.full(1, 0.8))), out_sharding=(None,))
        below = jnp.full(1, 0.8 - XIELU_BETA)
        self.alpha_n = FullPrecision(jnp.log(jnp.expm1(below)), out_sharding=(None,))


class Mlp(nnx.Module):
    """The mlp of a layer: two projections with an activation between them.

    A gated one has gate and value in one projection, with a dim of two before f. `hidden`: its
    width; default: `model.ffn`.
    """

    any_order = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, hidden: int | None = None):
        self.activation = config.mlp
        width: int = hidden or config.ffn
        if config.is_gated:
            self.up_shape = (2, width)
            self.up_axes = (None, "ffn")
        else:
            self.up_shape = (width,)
            self.up_axes = ("ffn",)
        std = hidden_std(config)
        down_std = std * (2 * config.layers) ** -0.5
        up_shape = (config.embed, *self.up_shape)
        self.up_ef = matmul_weight(rngs, up_shape, ("embed", *self.up_axes), std)
        self.down_fe = matmul_weight(rngs, (width, config.embed), ("ffn", "embed"), down_std)
        self.gate_factor, self.out_factor = config.mlp_gate_factor, config.mlp_out_factor
        self.slopes = XieluSlopes() if config.mlp == "xielu" else None
        if config.mlp_bias:
            self.up_bias = nnx.Param(jnp.zeros(self.up_shape), out_sharding=self.up_axes)
            self.down_bias = bias(config.embed, "norm")
        else:
            self.up_bias = None
            self.down_bias = None

    @part("mlp")
    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        h = ctx.column_parallel(x_bte, self.up_ef, self.up_axes)
        if self.up_bias is not None and self.activation == "gelu":
            names = ("batch", "time", *self.up_axes), self.up_axes
            h = ctx.local_map(biased_gelu, (h, self.up_bias[...]), names, names[0])
        else:
            if self.up_bias is not None:
                h = h + self.up_bias[...]
            if self.gate_factor != 1:
                h = scaled(h, jnp.array([[self.gate_factor], [1]], jnp.float32))
            h = ctx.constrain(h, "batch", "time", *self.up_axes)
            if self.slopes is None:
                h = recomputed(ACTIVATIONS[self.activation], ctx)(h)
            else:
                h = recomputed(xielu, ctx)(h, self.slopes.alpha_p[...], self.slopes.alpha_n[...])
        y = ctx.row_parallel(h, self.down_fe, ("ffn",))
        if self.down_bias is not None:
            y = y + self.down_bias[...]
        return scaled(y, self.out_factor)
