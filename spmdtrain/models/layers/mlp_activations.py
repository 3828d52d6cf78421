"""Defines the activations of an mlp. Each is computed in float32, and its result rounded once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.choose import device_kind
from pallas_kernels.gpus import is_nvidia
from pallas_kernels.wide import rounded_once

XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6

Activation = Callable[[jax.Array], jax.Array]


@rounded_once
def gelu(h_btf: jax.Array) -> jax.Array:
    """Computes GELU (arXiv:1606.08415) in its tanh form, as in GPT-2."""
    return jax.nn.gelu(h_btf)


@rounded_once
def gelu_exact(h_btf: jax.Array) -> jax.Array:
    """Computes GELU (arXiv:1606.08415) with the error function."""
    return jax.nn.gelu(h_btf, approximate=False)


@rounded_once
def relu2(h_btf: jax.Array) -> jax.Array:
    """Computes the square of ReLU (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(h_btf))


@rounded_once
def xielu(h_btf: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
    """Computes xIELU (arXiv:2411.13010) from its two slopes before softplus, [1].

    With b = 1/2 it is a_p x^2 + b x above 0, and a_n (e^x - 1 - x) + b x below.
    """
    above = jax.nn.softplus(alpha_p) * jnp.square(h_btf)
    # e^x - 1 of at most -1e-6, where its difference to x would be rounding.
    below = (jnp.expm1(jnp.minimum(h_btf, XIELU_EPSILON)) - h_btf) * (
        XIELU_BETA + jax.nn.softplus(alpha_n)
    )
    return jnp.where(h_btf > 0, above, below) + XIELU_BETA * h_btf


def _of_halves(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Activation:
    """Returns `function(gate, value)` of the halves of a gated projection h [b, t, 2, f]."""

    def of_halves(h_bt2f: jax.Array) -> jax.Array:
        # Their gradients are put side by side. Those of two indexed slices would each be padded to
        # the whole, and added.
        gate, value = jnp.split(h_bt2f, 2, -2)
        return function(jnp.squeeze(gate, -2), jnp.squeeze(value, -2))

    in_one_pass = jax.custom_vjp(of_halves)
    in_one_pass.defvjp(
        lambda h_bt2f: (of_halves(h_bt2f), h_bt2f),
        lambda h_bt2f, dy_btf: (_gradient_of_halves(function, h_bt2f, dy_btf),),
    )

    def activation(h_bt2f: jax.Array) -> jax.Array:
        return (in_one_pass if is_nvidia(device_kind()) else of_halves)(h_bt2f)

    return activation


def _gradient_of_halves(
    function: Callable[[jax.Array, jax.Array], jax.Array], h_bt2f: jax.Array, dy_btf: jax.Array
) -> jax.Array:
    """Returns the gradient [b, t, 2, f], computed where each of its elements is written.

    XLA for GPUs would write the sigmoid that both halves need to memory, in float32. Here each half
    computes it, which on a CPU takes longer than reading it.
    """
    is_gate = jnp.array([[True], [False]])
    other_bt2f = jnp.flip(h_bt2f, -2)
    gate = jnp.where(is_gate, h_bt2f, other_bt2f)
    value = jnp.where(is_gate, other_bt2f, h_bt2f)
    _, pull = jax.vjp(function, gate, value)
    dgate, dvalue = pull(jnp.broadcast_to(dy_btf[..., None, :], h_bt2f.shape))
    return jnp.where(is_gate, dgate, dvalue)


@rounded_once
def gated_silu(gate: jax.Array, value: jax.Array) -> jax.Array:
    """Computes SwiGLU (arXiv:2002.05202)."""
    return jax.nn.silu(gate) * value


@rounded_once
def gated_gelu(gate: jax.Array, value: jax.Array) -> jax.Array:
    """Computes GEGLU (arXiv:2002.05202) with tanh GELU, as in Gemma."""
    return jax.nn.gelu(gate) * value


@rounded_once
def gated_clamped(gate: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the SwiGLU of gpt-oss (arXiv:2508.10925), whose gate and value are clamped.

    The gate is at most 7; the value is clamped to -7 to 7, and 1 is added; SiLU has the slope
    1.702.
    """
    gate = jnp.minimum(gate, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(value, -7.0, 7.0) + 1)


swiglu, geglu = _of_halves(gated_silu), _of_halves(gated_gelu)
ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_exact": gelu_exact,
    "relu2": relu2,
    "swiglu": swiglu,
    "geglu": geglu,
    "swiglu_clamped": _of_halves(gated_clamped),
}
