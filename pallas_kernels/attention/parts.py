"""Separates the two passes of attention, for a caller that sees its keys in several parts.

Softmax over all keys follows from that over each part and the parts' lse. The backward pass of a
part takes the lse and delta of *all* keys: the gradient of a score needs nothing else of the other
parts (arXiv:2205.14135, appendix B). Neither function has a derivative rule.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_arrays
from pallas_kernels.attention.api import choose_for, implementation_of
from pallas_kernels.attention.problem import prepare
from pallas_kernels.wide import wide_dtype


def attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: str | None = None, **options
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [b, t, h, e] in the dtype of q, lse [b, t, h] in float32) of these keys.

    Args:
      options: as `attention` takes for masks and scores: causal, segment_ids, window, softcap,
        scale, positions. There is no bias.

    Raises:
      ValueError: the arguments do not fit together.
      Refused: the named implementation cannot run this call, or none can. cuDNN gives no lse.
    """
    module, given, problem, inputs = _call(q, k, v, implementation, options)
    return module.forward(problem, inputs, **given)


def attention_backward(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *,
    implementation: str | None = None,
    **options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns these keys' part of the gradients (dq, dk, dv), in the dtype of q.

    The dq of all keys is the sum over the parts.

    Args:
      arrays: (q, k, v) of `attention_forward`.
      dout: the gradient of out, [b, t, h, e].
      lse: of all keys, not only of these, [b, t, h].
      delta: of all keys, by `delta_of`.
      options: as in `attention_forward`.
    """
    module, given, problem, inputs = _call(*arrays, implementation, options)
    # An implementation computes delta as the sum of out x dout, less the gradient of lse.
    nothing = jnp.zeros_like(dout)
    dq, dk, dv, _ = module.backward(problem, inputs, nothing, lse, dout, -delta, **given)
    return dq, dk, dv


def delta_of(
    results: tuple[jax.Array, jax.Array], gradients: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Returns the sum of out x dout, less the gradient of lse: [b, t, h], wide.

    A query's softmax subtracts it from the gradient of each of its weights.

    Args:
      results: (out, lse) of all keys.
      gradients: the gradients of `results`.
    """
    out, lse = results
    dout, dlse = gradients
    wide = wide_dtype(out)
    delta = jnp.sum(out.astype(wide) * dout.astype(wide), -1) - dlse
    return jnp.where(jnp.isneginf(lse), 0, delta)


def _call(q, k, v, implementation: str | None, options):
    """Returns (module of the implementation, its arguments, problem, inputs) of a checked call."""
    check_arrays("attention", q=q, k=k, v=v)
    masks = {"causal": False, "segment_ids": None, "window": None, "positions": None}
    scores = {"softcap": None, "scale": None, "bias": None}
    problem, inputs = prepare(q, k, v, **(masks | scores | options))
    name = choose_for(problem, inputs, True, implementation)
    return *implementation_of(name), problem, inputs
