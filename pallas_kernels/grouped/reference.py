"""Defines the grouped matmul: one expert after another, over all rows."""

import jax
import jax.numpy as jnp

from pallas_kernels.wide import wide_dtype


def multiply(x_rk: jax.Array, w_xkn: jax.Array, expert_of_tile_t: jax.Array) -> jax.Array:
    """Returns x[row] times the weight of the row's expert [r, n]; 0 in tiles without one.

    Sums are in the wider of x's dtype and float32. Rows of unused tiles count as zeros, even NaN.
    """
    experts = w_xkn.shape[0]
    expert_r = jnp.repeat(expert_of_tile_t, x_rk.shape[0] // expert_of_tile_t.shape[0])
    y_rn = jnp.zeros((x_rk.shape[0], w_xkn.shape[2]), wide_dtype(x_rk))
    for expert in range(experts):
        own_rk = jnp.where((expert_r == expert)[:, None], x_rk, 0)
        y_rn += jnp.dot(own_rk, w_xkn[expert], preferred_element_type=y_rn.dtype)
    return y_rn.astype(x_rk.dtype)
