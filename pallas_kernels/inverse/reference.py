"""Defines the inverse."""

import jax
import jax.numpy as jnp


def unit_inverse(lower: jax.Array) -> jax.Array:
    """Returns (I + L)^-1 of the part L of `lower` [..., n, n] below its diagonal."""
    return jnp.linalg.inv(jnp.eye(lower.shape[-1], dtype=lower.dtype) + jnp.tril(lower, -1))
