"""Defines the mlp of a layer and its activations."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.bias import biased_gelu
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import FullPrecision
from spmdtrain.models.scaled import scaled

XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6


def gelu(h_btf: jax.Array) -> jax.Array:
    """Computes GELU (arXiv:1606.08415) in its tanh form, as in GPT-2."""
    return jax.nn.gelu(h_btf)


def gelu_exact(h_btf: jax.Array) -> jax.Array:
    """Computes GELU (arXiv:1606.08415) with the error function."""
    return jax.nn.gelu(h_btf, approximate=False)


def relu2(h_btf: jax.Array) -> jax.Array:
    """Computes the square of ReLU (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(h_btf))


def xielu(h_btf: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
    """Computes xIELU (arXiv:2411.13010) in float32, from its two slopes before softplus, [1].

    With b = 1/2 it is a_p x^2 + b x above 0, and a_n (e^x - 1 - x) + b x below.
    """
    x = h_btf.astype(jnp.float32)
    above = jax.nn.softplus(alpha_p.astype(jnp.float32)) * jnp.square(x)
    # e^x - 1 of at most -1e-6, where its difference to x would be rounding.
    below = (jnp.expm1(jnp.minimum(x, XIELU_EPSILON)) - x) * (
        XIELU_BETA + jax.nn.softplus(alpha_n.astype(jnp.float32))
    )
    return (jnp.where(x > 0, above, below) + XIELU_BETA * x).astype(h_btf.dtype)


def swiglu(h_bt2f: jax.Array) -> jax.Array:
    """Computes SwiGLU (arXiv:2002.05202) of gate and value."""
    gate, value = _gate_and_value(h_bt2f)
    return jax.nn.silu(gate) * value


def geglu(h_bt2f: jax.Array) -> jax.Array:
    """Computes GEGLU (arXiv:2002.05202) of gate and value, with tanh GELU, as in Gemma."""
    gate, value = _gate_and_value(h_bt2f)
    return jax.nn.gelu(gate) * value


def swiglu_clamped(h_bt2f: jax.Array) -> jax.Array:
    """Computes the SwiGLU of gpt-oss (arXiv:2508.10925), whose gate and value are clamped.

    The gate is at most 7; the value is clamped to -7 to 7, and 1 is added; SiLU has the slope
    1.702.
    """
    gate, value = _gate_and_value(h_bt2f)
    gate = jnp.minimum(gate, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(value, -7.0, 7.0) + 1)


def _gate_and_value(h_bt2f: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the halves of a gated projection.

    Their gradients are put side by side: those of two indexed slices would each be padded to the
    whole, and added.
    """
    gate, value = jnp.split(h_bt2f, 2, -2)
    return jnp.squeeze(gate, -2), jnp.squeeze(value, -2)


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_exact": gelu_exact,
    "relu2": relu2,
    "swiglu": swiglu,
    "geglu": geglu,
    "swiglu_clamped": swiglu_clamped,
}


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
