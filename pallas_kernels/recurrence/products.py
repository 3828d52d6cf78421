"""Multiplies with sums in float32."""

import jax
import jax.numpy as jnp


def product(subscripts: str, left: jax.Array, right: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the einsum of both in float32, with the factors in `dtype`.

    Factors in float32 are not rounded, whatever the default precision of matmuls is.
    """
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    left, right = left.astype(dtype), right.astype(dtype)
    return jnp.einsum(
        subscripts, left, right, precision=precision, preferred_element_type=jnp.float32
    )
