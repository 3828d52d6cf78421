"""Defines linear + cross-entropy, with all logits at once."""

import jax
import jax.numpy as jnp

from pallas_kernels.wide import wide_dtype


def summed_loss(
    x,
    weight,
    targets,
    mask,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> jax.Array:
    """Sums mask x (cross-entropy + z_loss x lse^2) over tokens: a scalar.

    x [n, e], weight [v, e], targets [n], mask [n]. Computed in the wider of x's dtype and float32.
    """
    wide = wide_dtype(x)
    logits_nv = jnp.einsum("ne,ve->nv", x, weight, preferred_element_type=wide) * scale
    if softcap is not None:
        logits_nv = softcap * jnp.tanh(logits_nv / softcap)
    lse = jax.nn.logsumexp(logits_nv, -1)
    target_logit = jnp.take_along_axis(logits_nv, targets[:, None], -1)[:, 0]
    # The mean logit under the target distribution, a share of which smoothing spreads evenly.
    expected_logit = (1 - label_smoothing) * target_logit + label_smoothing * logits_nv.mean(-1)
    cross_entropy = lse - expected_logit
    penalty = z_loss * lse * lse
    return jnp.sum(mask * (cross_entropy + penalty))
