"""Defines the weights of experts, and applies their mlp to rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped import grouped_matmul

# h [1, p, *u] -> [1, p, f], row by row; always the same object for a function
Activation = Callable[[jax.Array], jax.Array]


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts, of all or of one device.

    u is f, or 2 and f if the mlp is gated, the gate first.
    """

    up: jax.Array  # [l, e, *u]
    down: jax.Array  # [l, f, e]
    up_bias: jax.Array | None = None  # [l, *u]
    down_bias: jax.Array | None = None  # [l, e]


def multiply(
    weights: ExpertWeights,
    activation: Activation,
    x_pe: jax.Array,
    gate_p: jax.Array,
    expert_of_tile_t: jax.Array,
) -> jax.Array:
    """Returns each row's expert output times the row's gate [p, e].

    The gate, float32, multiplies the input of the second matmul: its gradient then needs no result
    of that matmul. Padding rows must be zeros, with a gate of 0.
    """
    own, width = weights.up.shape[:2]
    u = weights.up.shape[2:]
    h = grouped_matmul(x_pe, weights.up.reshape(own, width, -1), expert_of_tile_t)
    if weights.up_bias is not None:
        bias = _of_rows(weights.up_bias.reshape(own, -1), expert_of_tile_t, h.shape[0])
        h = (h + bias).astype(h.dtype)
    h_pf = activation(h.reshape(1, -1, *u))[0]
    gated_pf = (h_pf * gate_p[:, None]).astype(h_pf.dtype)
    y_pe = grouped_matmul(gated_pf, weights.down, expert_of_tile_t)
    if weights.down_bias is not None:
        bias_pe = _of_rows(weights.down_bias, expert_of_tile_t, y_pe.shape[0])
        y_pe = (y_pe + bias_pe * gate_p[:, None]).astype(y_pe.dtype)
    return y_pe


def _of_rows(bias_lf: jax.Array, expert_of_tile_t: jax.Array, rows: int) -> jax.Array:
    """Returns the bias of each row's expert, float32 [p, f]; 0 in tiles that nobody uses.

    A matmul looks them up: its transpose does not scatter, and sums in float32.
    """
    own = jnp.arange(bias_lf.shape[0])
    is_own_tl = (expert_of_tile_t[:, None] == own).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    bias_tf = jnp.dot(is_own_tl, bias_lf.astype(jnp.float32), precision=exact)
    return jnp.repeat(bias_tf, rows // bias_tf.shape[0], axis=0)
