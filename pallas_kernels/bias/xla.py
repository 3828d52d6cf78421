"""Implements both passes in plain jax, for devices that our kernels do not support."""

import jax
import jax.numpy as jnp

from pallas_kernels.wide import rounded_once

gelu = rounded_once(jax.nn.gelu)


def joined(dq_btkgd, dk_btkd, dv_btkd, _name: str) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients side by side, [b, t, k, n, d], and their float32 sum [k, n, d]."""
    parts = (dq_btkgd, dk_btkd[..., None, :], dv_btkd[..., None, :])
    whole = jnp.concatenate(parts, -2)
    return whole, whole.astype(jnp.float32).sum((0, 1))


def gelu_gradient(biased: jax.Array, dy: jax.Array, _name: str) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient [..., f] by the input of GELU, and its float32 sum [f]."""
    _, pull = jax.vjp(jax.nn.gelu, biased.astype(jnp.float32))
    gradient = pull(dy.astype(jnp.float32))[0].astype(biased.dtype)
    return gradient, gradient.astype(jnp.float32).reshape(-1, gradient.shape[-1]).sum(0)
