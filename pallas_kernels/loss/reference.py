"""The definition of linear + cross-entropy: all logits at once, in the widest of the inputs' dtype and float32."""

import jax
import jax.numpy as jnp


def summed_loss(
    x, weight, targets, mask, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> jax.Array:
    """Sum over tokens of mask x (cross-entropy + z_loss x lse^2), a scalar. x [n, e], weight [v, e], targets [n]."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("ne,ve->nv", x, weight, preferred_element_type=wide)
    lse = jax.nn.logsumexp(logits, -1)
    target = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    wanted = (1 - label_smoothing) * target + label_smoothing * logits.mean(-1)
    return jnp.sum(mask * (lse - wanted + z_loss * lse * lse))
