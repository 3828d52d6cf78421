"""The two passes of attention apart, for a caller that sees its keys in several parts.

Softmax over all keys follows from that over each part and the parts' lse. The backward pass of a
part takes the out and lse of *all* keys: the gradient of a score then needs nothing else of the
other parts (arXiv:2205.14135, appendix B). Neither function has a derivative rule of its own.
"""

import jax

from pallas_kernels.attention.api import choose_for, implementation_of
from pallas_kernels.attention.problem import prepare
from pallas_kernels.given import check_arrays


def attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, implementation: str | None = None, **options
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [b, t, h, e] in the dtype of q, lse [b, t, h] in float32) of these keys.

    Args:
      options: those of `attention` for masks and scores: causal, segment_ids, window, softcap,
        scale, positions. There is no bias.

    Raises:
      ValueError: the arguments do not fit together.
      Refused: the named implementation cannot run this call, or none can. cuDNN gives no lse.
    """
    module, given, problem, inputs = _call(q, k, v, implementation, options)
    return module.forward(problem, inputs, **given)


def attention_backward(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    implementation: str | None = None,
    **options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the part (dq, dk, dv) that these keys have in the gradients, in the dtype of q.

    The dq of all keys is the sum over the parts.

    Args:
      arrays: (q, k, v) of `attention_forward`.
      results: (out, lse) of all keys, not only of these.
      gradients: those of the results; that of lse must be 0 for a query that sees no key.
      options: those of `attention_forward`.
    """
    module, given, problem, inputs = _call(*arrays, implementation, options)
    dq, dk, dv, _ = module.backward(problem, inputs, *results, *gradients, **given)
    return dq, dk, dv


def _call(q, k, v, implementation: str | None, options):
    """Returns (module of the implementation, its arguments, problem, inputs) of a checked call."""
    check_arrays("attention", q=q, k=k, v=v)
    masks = {"causal": False, "segment_ids": None, "window": None, "positions": None}
    scores = {"softcap": None, "scale": None, "bias": None}
    problem, inputs = prepare(q, k, v, **(masks | scores | options))
    name = choose_for(problem, inputs, True, implementation)
    return *implementation_of(name), problem, inputs
