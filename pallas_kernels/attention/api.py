"""`attention`: one function, one derivative rule, several implementations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.arguments import check_arrays, check_flag
from pallas_kernels.attention import cudnn, tiling, xla
from pallas_kernels.attention.problem import Inputs, Problem, call_of, prepare
from pallas_kernels.calls import AttentionCall
from pallas_kernels.choose import INTERPRET, VARIANT, choose, device_kind
from pallas_kernels.counting import is_counted, marked, seen_pairs
from pallas_kernels.gpus import generation
from pallas_kernels.partition import refuse_checked_vma

IMPLEMENTATIONS = ("xla", "mosaic", "triton", "cudnn")
# The default order is reasoned, not measured. cuDNN's forward is published at 395 to 617 TFLOP/s on
# an H100 (arXiv:2407.08608, head dims 64 and 128). What it refuses goes to our kernels, those of
# the GPU's generation first: XLA writes its scores to memory.
OURS = {"ampere": ("triton",), "hopper": ("mosaic", "triton"), "blackwell": ("triton",)}
READERS = ("mosaic",)  # which can read queries, keys and values as parts of one array: joined.py
FEWEST_QUERIES = 64  # with fewer, as in generation, our tiles are mostly padding
SAVED = "attention"  # the checkpoint_name that `saveable` keeps


def attention(  # noqa: PLR0913 - the question has as many parts
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    bias: jax.Array | None = None,
    positions: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes softmax(q k^T) v without T x T memory (arXiv:2205.14135), in the dtype of q.

    Accumulated in float32, or float64 for float64.

    A query that sees no key gives 0 and no gradient. Keys and values that no query sees may hold
    NaN.

    Args:
      q: [batch, t, heads, head_dim]; bfloat16, float16, float32 or float64.
      k: [batch, s, key-value heads, head_dim]. Query heads share key-value heads in order.
      v: [batch, s, key-value heads, any width].
      causal: no key at a later position than the query's.
      segment_ids: integers [batch, time], or a pair of them for queries and keys. A query sees
        only keys of its own segment.
      window: (left, right), how many positions before and after its own a query sees; None: no
        bound.
      softcap: scores x become softcap * tanh(x / softcap).
      scale: of scores; default: head_dim ** -0.5.
      bias: broadcasts to [batch, heads, t, s] and is added to the scores, after the softcap; -inf
        hides a key.
      positions: integers, like segment_ids. By default the sequences end together: key j is at
        position j, query i at i + s - t.
      return_lse: also return the natural logarithm of the softmax's denominator, float32
        [batch, t, heads], -inf if no key is seen.
      implementation: a name of IMPLEMENTATIONS, which never falls back; None takes the first that
        does not refuse: cuDNN, our kernels for the GPU's generation, XLA.

    Returns:
      [batch, t, heads, width of v], or a pair with the lse.

    Raises:
      ValueError: the arguments do not fit together.
      Refused: the named implementation cannot run this call, or none can.
    """
    if is_counted():
        return _mark(q, k, v, causal, window, return_lse)
    check_arrays("attention", q=q, k=k, v=v, bias=bias)
    check_flag("attention", "return_lse", return_lse)
    refuse_checked_vma("attention", q, k, v, bias)
    problem, inputs = prepare(
        q,
        k,
        v,
        causal=causal,
        segment_ids=segment_ids,
        window=window,
        softcap=softcap,
        scale=scale,
        bias=bias,
        positions=positions,
    )
    name = choose_for(problem, inputs, return_lse, implementation)
    if name == "cudnn":  # it has its own derivative rule
        return cudnn.attend(problem, inputs)
    out, lse = _attend_compiled(problem, name, inputs)
    return (out, lse) if return_lse else out


def choose_for(problem: Problem, inputs: Inputs, return_lse: bool, implementation: str | None):
    """Returns the name of the implementation that runs this call; raises as `attention` does."""
    refusals: dict[str, Callable[[bool], str]] = {
        name: partial(_refusal, name.partition(VARIANT)[0], problem, inputs)
        for name in candidates()
    }
    if return_lse:
        refusals["cudnn"] = lambda _: "gives no lse"
    call = call_of(problem, inputs, return_lse)
    return choose("attention", refusals, order(call), implementation, call)


def candidates() -> tuple[str, ...]:
    """Returns the names of all implementations, and of their other tilings."""
    tilings = [f"triton{VARIANT}{name}" for name in tiling.VARIANTS]
    tilings += [f"mosaic{VARIANT}{name}" for name in tiling.HOPPER_VARIANTS]
    return (*IMPLEMENTATIONS, *tilings)


def may_read_in_place() -> bool:
    """Returns True if an implementation for this GPU reads the parts of one array in place."""
    return any(reader in OURS.get(generation(device_kind()), ()) for reader in READERS)


def order(call: AttentionCall) -> tuple[str, ...]:
    """Returns the implementations of a call, best first, if nothing was measured."""
    ours = OURS.get(generation(device_kind()), ()) if call.queries >= FEWEST_QUERIES else ()
    return ("cudnn", *ours, "xla")


def _mark(q, k, v, causal, window, return_lse):
    """Returns the mark of a call: two matmuls over the pairs of query and key that it sees."""
    batch, queries, heads, dim = q.shape
    pairs = seen_pairs(queries, k.shape[1], causal, window)
    flops = 2.0 * batch * heads * pairs * (dim + v.shape[-1])
    out = marked((batch, queries, heads, v.shape[-1]), q.dtype, flops)
    if not return_lse:
        return out
    return out, jnp.zeros((batch, queries, heads), jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, name: str, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    return _forward(problem, name, inputs)[0]


def _forward(problem, name, inputs):
    module, options = implementation_of(name)
    out, lse = module.forward(problem, inputs, **options)
    out = checkpoint_name(out, SAVED)
    lse = checkpoint_name(lse, SAVED)
    return (out, lse), (inputs, out, lse)


@partial(jax.jit, static_argnums=(0, 1), inline=True)  # jax 0.10 calls it outside any jit
def _backward(problem, name, kept, gradients):
    inputs, out, lse = kept
    dout, dlse = gradients
    dlse = jnp.where(jnp.isneginf(lse), 0, dlse)
    module, options = implementation_of(name)
    dq, dk, dv, dbias = module.backward(problem, inputs, out, lse, dout, dlse, **options)
    return (Inputs(dq, dk, dv, dbias),)  # no gradient of segment ids and positions


def implementation_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns (module, its keyword arguments), for "NAME/TILING:interpret" too."""
    plain, _, variant = name.removesuffix(INTERPRET).partition(VARIANT)
    options: dict[str, Any] = {"interpret": True} if name.endswith(INTERPRET) else {}
    if variant:
        options["variant"] = variant
    return _module(plain), options


def _module(name: str) -> Any:
    """Returns the module of an implementation. Kernels are imported for calls that they may run."""
    if name == "mosaic":
        from pallas_kernels.attention import hopper

        return hopper
    if name == "triton":
        from pallas_kernels.attention import triton

        return triton
    return {"xla": xla, "cudnn": cudnn}[name]


def _refusal(name: str, problem: Problem, inputs: Inputs, interpret: bool) -> str:
    return _module(name).refusal(problem, inputs, interpret)


_attend.defvjp(_forward, _backward)
# Compiled once, also outside any jit.
_attend_compiled = jax.jit(_attend, static_argnums=(0, 1), inline=True)


def saveable(primitive, *avals, **options) -> bool:
    """Keeps out and lse, as a policy for `jax.checkpoint`, so that attention does not run again.

    Its backward pass reads them along with q, k and v.
    """
    named = jax.checkpoint_policies.save_only_these_names(SAVED)(primitive, *avals, **options)
    return named or primitive.name == cudnn.FORWARD
