"""Defines both norms, over the last dim."""

import jax
import jax.numpy as jnp

from pallas_kernels.wide import wide_dtype


def normalise(
    x, scale, bias, residual, *, epsilon: float, centred: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns (y in the dtype of x, the sum that was normalised).

    The sum is x + residual in the dtype of the residual, or x without one. Computed in the wider of
    x's dtype and float32. `centred`: LayerNorm, otherwise RMSNorm.
    """
    wide = wide_dtype(x)
    total = x.astype(wide)
    if residual is not None:
        total = total + residual.astype(wide)
    rounded = total.astype(x.dtype if residual is None else residual.dtype)
    normal = rounded.astype(wide)
    if centred:
        normal = normal - normal.mean(-1, keepdims=True)
    variance = jnp.square(normal).mean(-1, keepdims=True)
    rstd = jax.lax.rsqrt(variance + epsilon)
    y = normal * rstd * scale
    if bias is not None:
        y = y + bias
    return y.astype(x.dtype), rounded
