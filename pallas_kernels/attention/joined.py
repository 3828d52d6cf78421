"""`joined_attention`: self-attention whose queries, keys and values are parts of one array.

A projection makes them side by side. Kernels that can read them there and write their gradients
there spare a copy in each pass. The others get them apart.

n: the slots of a key-value head: its group of queries, its key, its value. Other letters as in
problem.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.arguments import check_arrays
from pallas_kernels.attention.api import READERS, SAVED, attention, choose_for, implementation_of
from pallas_kernels.attention.problem import Inputs, Problem, call_of, prepare
from pallas_kernels.bias import add_vector, biased_heads, heads_apart
from pallas_kernels.calls import AttentionCall
from pallas_kernels.choose import INTERPRET, VARIANT
from pallas_kernels.chosen import IN_PLACE, chosen_form
from pallas_kernels.counting import is_counted
from pallas_kernels.partition import refuse_checked_vma

JOINED = "joined"  # what may be chosen to be in place


def joined_attention(  # noqa: PLR0913 - the question has as many parts
    products_btknd: jax.Array,
    bias_knd: jax.Array | None = None,
    *,
    causal: bool = False,
    segment_ids: jax.Array | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes `attention` of the parts of products + bias.

    Args:
      products_btknd: [batch, time, key-value heads, slots, head dim]; of the slots of a head the
        last is its value, the one before its key, the others its queries.
      bias_knd: [key-value heads, slots, head dim]. Its gradient is summed in float32.
      segment_ids: integers [batch, time], for queries and keys.
      causal, window, softcap, scale: as in `attention`.
      implementation: as in `attention`. A named one that can read in place does; without a name it
        takes IN_PLACE among the decisions of chosen.py.

    Returns:
      [batch, time, query heads, head dim].

    Raises:
      ValueError, Refused: as `attention`.
    """
    op = "joined_attention"
    check_arrays(op, products=products_btknd, bias=bias_knd)
    refuse_checked_vma(op, products_btknd, bias_knd)
    shape = products_btknd.shape
    if len(shape) != 5 or shape[3] < 3 or (bias_knd is not None and bias_knd.shape != shape[2:]):
        biased = "" if bias_knd is None else f" and bias {bias_knd.shape}"
        raise ValueError(
            f"{op}: products {shape}{biased} are not [batch, time, heads, 3 or more slots, head "
            "dim] and [heads, slots, head dim]"
        )
    options = {
        "causal": causal,
        "segment_ids": segment_ids,
        "window": window,
        "softcap": softcap,
        "scale": scale,
    }
    if not is_counted():
        problem, inputs = prepare(*_parts(products_btknd), bias=None, positions=None, **options)
        name = choose_for(problem, inputs, False, implementation)
        is_named = implementation is not None
        if _reads_in_place(name, call_of(problem, inputs, False), is_named=is_named):
            return _attend(problem, name, products_btknd, bias_knd, inputs.q_segment_ids)
    if bias_knd is None:
        parts = heads_apart(products_btknd)
    else:
        parts = biased_heads(products_btknd, bias_knd)
    q_bthd, *kv = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in parts)
    out = attention(q_bthd, *kv, implementation=implementation, **options)
    assert isinstance(out, jax.Array)
    return out


def _reads_in_place(name: str, call: AttentionCall, *, is_named: bool) -> bool:
    """Returns True if the implementation can, and somebody asked for it: no GPU has done it yet."""
    plain = name.removesuffix(INTERPRET).partition(VARIANT)[0]
    return plain in READERS and (is_named or chosen_form(call, JOINED) == IN_PLACE)


def _parts(joined_btknd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q_bthd, k_btkd and v_btkd: of use for their shapes alone, they cost nothing."""
    q, k, v = heads_apart(joined_btknd)
    return q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v


def _inputs(joined_btknd: jax.Array, segment_ids: jax.Array | None) -> Inputs:
    ids = {"q_segment_ids": segment_ids, "kv_segment_ids": segment_ids}
    return Inputs(*_parts(joined_btknd), **ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, name: str, products_btknd, bias_knd, segment_ids) -> jax.Array:
    return _forward(problem, name, products_btknd, bias_knd, segment_ids)[0]


def _forward(problem, name, products_btknd, bias_knd, segment_ids):
    joined = products_btknd if bias_knd is None else add_vector(products_btknd, bias_knd)
    module, options = implementation_of(name)
    inputs = _inputs(joined, segment_ids)
    out, lse = module.forward(problem, inputs, joined_btknd=joined, **options)
    out = checkpoint_name(out, SAVED)
    lse = checkpoint_name(lse, SAVED)
    like_bias = None if bias_knd is None else jnp.zeros((0,), bias_knd.dtype)
    return out, (joined, segment_ids, out, lse, like_bias)


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _backward(problem, name, kept, dout):
    joined, segment_ids, out, lse, like_bias = kept
    module, options = implementation_of(name)
    inputs = _inputs(joined, segment_ids)
    dproducts, sums = module.joined_backward(problem, inputs, joined, (out, lse), dout, **options)
    dbias = None if like_bias is None else sums.astype(like_bias.dtype)
    return dproducts, dbias, None


_attend.defvjp(_forward, _backward)
