"""Multiplies activations by factors of the settings without rounding these first."""

import jax
import jax.numpy as jnp


def scaled(x: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Returns x times a number or a float32 array, rounded once, in the dtype of x.

    In `x * factor` jax rounds a number to the dtype of x, and one in front of a whole array makes
    every product wrong in the same direction: in bfloat16 0.9 is 0.8984, 0.18 % too small.
    """
    if isinstance(factor, float | int) and factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
