"""The definition of linear + cross-entropy: all logits at once."""

import jax
import jax.numpy as jnp

from pallas_kernels.wide import wide_dtype


def summed_loss(
    x, weight, targets, mask, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> jax.Array:
    """Sum over tokens of mask x (cross-entropy + z_loss x lse^2), a scalar.

    x [n, e], weight [v, e], targets [n], mask [n]; in the widest of x's dtype and float32.
    """
    wide = wide_dtype(x)
    logits_nv = jnp.einsum("ne,ve->nv", x, weight, preferred_element_type=wide)
    lse = jax.nn.logsumexp(logits_nv, -1)
    target_logit = jnp.take_along_axis(logits_nv, targets[:, None], -1)[:, 0]
    # The logit's mean under the target distribution, which smoothing spreads over the vocabulary.
    expected_logit = (1 - label_smoothing) * target_logit + label_smoothing * logits_nv.mean(-1)
    return jnp.sum(mask * (lse - expected_logit + z_loss * lse * lse))
