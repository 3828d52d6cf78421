"""Gives the dtype in which sums, means and softmaxes are computed."""

import jax
import jax.numpy as jnp


def wide_dtype(x: jax.Array) -> type:
    """Returns float64 if x has it, else float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def widen(x: jax.Array) -> jax.Array:
    """Returns x in `wide_dtype`."""
    return x.astype(wide_dtype(x))


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x in `dtype`, rounded to it even where XLA would keep the wide values.

    On GPUs XLA drops a cast to a narrow float and back. The forward pass then computes from other
    values than those that the backward pass gets. It never drops `reduce_precision`.
    """
    narrow = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, narrow.nexp, narrow.nmant).astype(dtype)
