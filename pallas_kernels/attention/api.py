"""`attention`: one function, one derivative rule, several implementations."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import cudnn, hopper, triton, xla
from pallas_kernels.attention.problem import Inputs, Problem, prepare
from pallas_kernels.choose import INTERPRET, choose
from pallas_kernels.partition import unchecked

IMPLEMENTATIONS = {"xla": xla, "mosaic": hopper, "triton": triton, "cudnn": cudnn}
# Published: cuDNN's forward at 395 to 617 TFLOP/s on an H100 (arXiv:2407.08608, head dims 64 and 128). Our kernels take
# their places once they are measured.
PREFERENCE = ("cudnn", "xla")
NAME = "attention"  # of what `saveable` keeps


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
    """softmax(q k^T) v, in the dtype of q, accumulated in float32. q: [batch, t, heads, head_dim], k and v: [batch, s,
    key-value heads, ...]; query heads share key-value heads in order, and v may be wider or narrower than k.

    Different lengths are aligned at their ends: query i is at position i + s - t, unless `positions`, one array [batch,
    time] or a (query, key) pair, says otherwise. `causal`: no key at a later position. `window` = (left, right): keys
    at most so many positions before and after the query, None: no bound. `segment_ids`, as positions: only keys of the
    query's own segment. `scale`: head_dim ** -0.5 unless given; `softcap`: scores x become softcap tanh(x / softcap).
    `bias` broadcasts to [batch, heads, t, s] and is added last; -inf in it hides a key.

    A query that sees no key gives 0 and no gradient. Keys and values that no query sees may hold NaN.
    `return_lse`: also the natural logarithm of the softmax's denominator, float32 [batch, t, heads], -inf where no key
    is seen. `implementation` None: the first that does not refuse, in the order of PREFERENCE; a named one never
    falls back: it raises `Refused`.
    """
    unchecked("attention", q, k, v, bias)
    problem, inputs = prepare(
        q, k, v, causal=causal, segment_ids=segment_ids, window=window, softcap=softcap, scale=scale, bias=bias,
        positions=positions,
    )  # fmt: skip
    refusals = {
        name: partial(module.refusal, problem, inputs) for name, module in IMPLEMENTATIONS.items()
    }
    refusals["cudnn"] = lambda interpreted: (
        "gives no lse" if return_lse else cudnn.refusal(problem, inputs, interpreted)
    )
    name = choose("attention", refusals, PREFERENCE, implementation)
    if name == "cudnn":
        return cudnn.attend(problem, inputs)
    out, lse = _attend_compiled(problem, name, inputs)
    return (out, lse) if return_lse else out


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, name: str, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    return _forward(problem, name, inputs)[0]


def _forward(problem, name, inputs):
    module, how = _implementation(name)
    out, lse = (checkpoint_name(x, NAME) for x in module.forward(problem, inputs, **how))
    return (out, lse), (inputs, out, lse)


@partial(jax.jit, static_argnums=(0, 1), inline=True)  # jax 0.10 calls it outside any jit
def _backward(problem, name, kept, gradients):
    inputs, out, lse = kept
    dout, dlse = gradients
    dlse = jnp.where(jnp.isneginf(lse), 0, dlse)
    module, how = _implementation(name)
    dq, dk, dv, dbias = module.backward(problem, inputs, out, lse, dout, dlse, **how)
    return (Inputs(dq, dk, dv, dbias),)


def _implementation(name):
    """(module, arguments that say how it runs)"""
    plain = name.removesuffix(INTERPRET)
    return IMPLEMENTATIONS[plain], {"interpret": True} if name != plain else {}


_attend.defvjp(_forward, _backward)
_attend_compiled = jax.jit(
    _attend, static_argnums=(0, 1), inline=True
)  # once, also outside any jit


def saveable(primitive, *avals, **options) -> bool:
    """A policy of `jax.checkpoint`: what attention's backward reads beside q, k and v, its out and lse, is kept."""
    named = jax.checkpoint_policies.save_only_these_names(NAME)(primitive, *avals, **options)
    return named or primitive.name == cudnn.FORWARD
