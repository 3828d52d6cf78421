"""Chooses the next token from logits."""

import jax
import jax.numpy as jnp


def choose(
    logits_bv: jax.Array,
    key: jax.Array,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """Returns token ids int32 [b].

    `temperature` 0 takes the likeliest. `top_k` draws only among the k likeliest. `top_p` (nucleus
    sampling, arXiv:1904.09751) draws among the fewest likeliest whose probabilities reach p. Of
    equally likely tokens the one with the smaller id comes first, so `top_k` 1 is the likeliest.
    """
    if temperature == 0:
        return jnp.argmax(logits_bv, -1).astype(jnp.int32)
    logits_bv = logits_bv / temperature
    if top_k is not None and top_k < logits_bv.shape[-1]:
        logits_bv = jnp.where(_rank(logits_bv) < top_k, logits_bv, -jnp.inf)
    if top_p is not None and top_p < 1:
        rank_bv = _rank(logits_bv)
        falling = -jnp.sort(-logits_bv, -1)
        before = jnp.cumsum(jax.nn.softmax(falling), -1) - jax.nn.softmax(falling)
        # Keeps the tokens that come before p is reached; the first always does.
        count = jnp.sum(before < top_p, -1, keepdims=True)
        logits_bv = jnp.where(rank_bv < count, logits_bv, -jnp.inf)
    return jax.random.categorical(key, logits_bv).astype(jnp.int32)


def _rank(logits_bv: jax.Array) -> jax.Array:
    """Returns the rank of each token by likelihood [b, v], 0 for the first."""
    order = jnp.argsort(-logits_bv, -1, stable=True)
    return jnp.argsort(order, -1)
