"""The definition of both norms, over the last dim, in the widest of the inputs' dtype and float32."""

import jax
import jax.numpy as jnp


def normalise(
    x, scale, bias, residual, *, epsilon: float, centred: bool
) -> tuple[jax.Array, jax.Array]:
    """(y, x + residual), y in the dtype of x, the sum in that of the residual (of x without one)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = x.astype(wide) if residual is None else x.astype(wide) + residual.astype(wide)
    kept = total.astype(x.dtype if residual is None else residual.dtype)
    total = kept.astype(wide)
    if centred:
        total = total - total.mean(-1, keepdims=True)
    y = total * jax.lax.rsqrt(jnp.square(total).mean(-1, keepdims=True) + epsilon) * scale
    return (y if bias is None else y + bias).astype(x.dtype), kept
