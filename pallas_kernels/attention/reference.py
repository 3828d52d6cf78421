"""Defines attention, with its T x T scores, which every implementation must equal."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.mask import dense_mask
from pallas_kernels.attention.problem import Inputs, Problem


def attend(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out [b, t, h, e], natural-log lse [b, t, h]), in the dtype of the inputs.

    The order is scale, softcap, bias, mask. A query without a visible key gives 0 and -inf.
    """
    q = inputs.q_bthd
    k = jnp.repeat(inputs.k_bskd, inputs.group, axis=2)
    v = jnp.repeat(inputs.v_bske, inputs.group, axis=2)
    mask = dense_mask(problem, inputs)
    if mask is None:
        mask = jnp.ones((1, *inputs.lengths), bool)
    mask = mask[:, None]  # [b or 1, h or 1, t, s]
    if inputs.bias is not None:
        mask = mask & (inputs.bias > -jnp.inf)
    query_is_visible = mask.any((1, 3))
    key_is_visible = mask.any((1, 2))
    q = _zero_hidden(q, query_is_visible)
    k = _zero_hidden(k, key_is_visible)
    v = _zero_hidden(v, key_is_visible)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * jnp.asarray(problem.scale, q.dtype)
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    if inputs.bias is not None:
        scores = scores + jnp.where(mask, inputs.bias, 0).astype(q.dtype)
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    # The largest score is subtracted only for exp's range: no gradient goes through it.
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - largest), 0)
    total = weights.sum(-1, keepdims=True)
    has_key = total > 0
    total = jnp.where(has_key, total, 1)
    out = jnp.einsum("bhts,bshe->bthe", weights / total, v)
    lse = jnp.where(has_key, largest + jnp.log(total), -jnp.inf)[..., 0]
    return out, jnp.moveaxis(lse, 1, 2)


def _zero_hidden(x: jax.Array, visible: jax.Array) -> jax.Array:
    """Zeroes the rows of x that are in no visible pair: they may hold NaN, and NaN x 0 is NaN."""
    return jnp.where(visible[:, :, None, None], x, 0)
