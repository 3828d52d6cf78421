"""Gives the dtype in which sums, means and softmaxes are computed."""

import jax
import jax.numpy as jnp


def wide_dtype(x: jax.Array) -> type:
    """Returns float64 if x has it, else float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def widen(x: jax.Array) -> jax.Array:
    """Returns x in `wide_dtype`."""
    return x.astype(wide_dtype(x))
