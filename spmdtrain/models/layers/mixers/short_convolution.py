"""Computes the short causal convolution along the tokens, channel by channel."""

import jax
import jax.numpy as jnp


def short_convolution(
    x_btn: jax.Array,
    taps_nw: jax.Array,
    starts_bt: jax.Array,
    before_bwn: jax.Array,
) -> jax.Array:
    """Returns y_t = sum_w taps_w x_{t - (W - 1) + w} in float32, for x [b, t, ...] and taps
    [..., w].

    The last tap is the token itself. A tap that reaches over the start of a document reads 0.
    `starts_bt`: True for the first token of each document. `before_bwn`: the W - 1 inputs in front
    of x, which its first token goes on with.

    It is a sum of shifted products: XLA fuses them, and they partition over any dim of channels.
    """
    taps = taps_nw.astype(jnp.float32)
    count, tokens = taps.shape[-1], x_btn.shape[1]
    extended = with_inputs_before(x_btn, before_bwn)
    document_bt = jnp.cumsum(starts_bt, 1, dtype=jnp.int32)
    documents = jnp.pad(document_bt, ((0, 0), (count - 1, 0)))
    y = jnp.zeros(x_btn.shape, jnp.float32)
    for tap in range(count):
        is_same = documents[:, tap : tap + tokens] == document_bt
        product = extended[:, tap : tap + tokens].astype(jnp.float32) * taps[..., tap]
        y = y + jnp.where(jnp.expand_dims(is_same, range(2, x_btn.ndim)), product, 0)
    return y


def with_inputs_before(x_btn: jax.Array, before_bwn: jax.Array) -> jax.Array:
    """Returns x with the inputs in front of it."""
    return jnp.concatenate((before_bwn.astype(x_btn.dtype), x_btn), 1)


def inputs_behind(x_btn: jax.Array, before_bwn: jax.Array) -> jax.Array:
    """Returns the last inputs of x, and of those in front of it, as many as these are."""
    return with_inputs_before(x_btn, before_bwn)[:, x_btn.shape[1] :]
