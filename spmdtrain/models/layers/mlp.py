"""Defines the mlp of a layer and its activations."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.bias import biased_gelu
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight, recomputed


def gelu(h_btf: jax.Array) -> jax.Array:
    """Computes GELU (arXiv:1606.08415) in its tanh form, as in GPT-2."""
    return jax.nn.gelu(h_btf)


def gelu_exact(h_btf: jax.Array) -> jax.Array:
    """Computes GELU (arXiv:1606.08415) with the error function."""
    return jax.nn.gelu(h_btf, approximate=False)


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
    "swiglu": swiglu,
    "geglu": geglu,
    "swiglu_clamped": swiglu_clamped,
}


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
            h = ctx.constrain(h, "batch", "time", *self.up_axes)
            h = recomputed(ACTIVATIONS[self.activation], ctx)(h)
        y = ctx.row_parallel(h, self.down_fe, ("ffn",))
        if self.down_bias is not None:
            y = y + self.down_bias[...]
        return y
