"""The definition of attention, T x T and all, in the dtype of its inputs: what every implementation must equal."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Inputs, Problem, sees


def attend(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """(out [b, t, h, e], natural-log lse [b, t, h]); a query that sees no key gives 0 and -inf.

    The order is scale, softcap, bias, mask.
    """
    q, (t, s), group = inputs.q_bthd, inputs.lengths, inputs.group
    k, v = (jnp.repeat(x, group, axis=2) for x in (inputs.k_bskd, inputs.v_bske))
    q_position, k_position = inputs.positions or (jnp.arange(t)[None] + s - t, jnp.arange(s)[None])
    q_segment, k_segment = inputs.segments or (None, None)
    split = () if q_segment is None else (q_segment[:, :, None], k_segment[:, None])
    seen = sees(problem, q_position[:, :, None], k_position[:, None], *split)
    seen = jnp.ones((1, 1, t, s), bool) if seen is None else seen[:, None]
    if inputs.bias is not None:
        seen = seen & (inputs.bias > -jnp.inf)
    # Rows and columns that nothing sees may hold anything: NaN x 0 must not reach the others.
    k, v = (_kept(x, seen.any((1, 2))) for x in (k, v))
    q = _kept(q, seen.any((1, 3)))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * jnp.asarray(problem.scale, q.dtype)
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    if inputs.bias is not None:
        scores = scores + jnp.where(seen, inputs.bias, 0).astype(q.dtype)
    low = jnp.finfo(scores.dtype).min
    scores = jnp.where(seen, scores, low)
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - largest), 0)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    out = jnp.einsum("bhts,bshe->bthe", weights / total, v)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]
    return out, jnp.moveaxis(lse, 1, 2)


def _kept(x: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(kept[:, :, None, None], x, 0)
