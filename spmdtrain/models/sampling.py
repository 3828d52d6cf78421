"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp


def choose(
    logits_bv: jax.Array,
    key: jax.Array,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """Token ids int32 [b].

    `temperature` 0 takes the likeliest. `top_k` draws among the k likeliest only. `top_p` (nucleus
    sampling, arXiv:1904.09751) draws among the fewest likeliest whose probabilities reach p.
    """
    if temperature == 0:
        return jnp.argmax(logits_bv, -1).astype(jnp.int32)
    logits_bv = logits_bv / temperature
    if top_k is not None and top_k < logits_bv.shape[-1]:
        least = jax.lax.top_k(logits_bv, top_k)[0][:, -1:]
        logits_bv = jnp.where(logits_bv < least, -jnp.inf, logits_bv)
    if top_p is not None and top_p < 1:
        falling = -jnp.sort(-logits_bv, -1)
        before = jnp.cumsum(jax.nn.softmax(falling), -1) - jax.nn.softmax(falling)
        least = jnp.min(jnp.where(before < top_p, falling, jnp.inf), -1, keepdims=True)
        logits_bv = jnp.where(logits_bv < least, -jnp.inf, logits_bv)
    return jax.random.categorical(key, logits_bv).astype(jnp.int32)
