"""`layernorm` and `rmsnorm`: one derivative rule, several implementations."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import as_number, check_arrays, check_flag, check_floating
from pallas_kernels.calls import NormCall
from pallas_kernels.choose import INTERPRET, VARIANT, choose, device_kind
from pallas_kernels.chosen import APART, chosen_form
from pallas_kernels.gpus import generation
from pallas_kernels.norm import triton, xla
from pallas_kernels.partition import refuse_checked_vma

IMPLEMENTATIONS = {"xla": xla, "triton": triton}
WITH_X = "with x"  # what may be chosen to be apart: the gradient of what `returns_x` returns
# The default order is reasoned, not measured: one kernel reads and writes each array once.
OURS = {"ampere": ("triton",), "hopper": ("triton",), "blackwell": ("triton",)}


def layernorm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    returns_x: bool = False,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes LayerNorm (arXiv:1607.06450) over the last dim, in the dtype of x.

    (x - mean) / sqrt(variance + eps) * scale + bias. Statistics are float32, and so are the
    gradients of scale and bias until they are rounded to their dtypes.

    Args:
      x: [..., width], floating.
      scale, bias: [width], floating.
      residual: of x's shape, in any floating dtype. With it x + residual is normalised, rounded to
        the residual's dtype.
      returns_x: also return x, for what else reads it. Read from here, its gradient is added to the
        norm's own by the kernel that makes that, in float32.
      implementation: a name of IMPLEMENTATIONS, which never falls back; None takes the first that
        does not refuse: our kernels for the GPU's generation, XLA.

    Returns:
      y, of x's shape; with a residual (y, x + residual); with `returns_x` (y, x).

    Raises:
      ValueError: the arguments do not fit together.
      Refused: the named implementation cannot run this call.
    """
    return _norm("layernorm", x, scale, bias, residual, returns_x, eps, implementation)


def rmsnorm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    returns_x: bool = False,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes RMSNorm (arXiv:1910.07467) over the last dim.

    x / sqrt(mean(x^2) + eps) * scale + bias. Everything else is as in `layernorm`.
    """
    return _norm("rmsnorm", x, scale, bias, residual, returns_x, eps, implementation)


def candidates() -> tuple[str, ...]:
    """Returns the names of all implementations, and of their other tilings."""
    return (*IMPLEMENTATIONS, *(f"triton{VARIANT}{name}" for name in triton.VARIANTS))


def order(_: NormCall) -> tuple[str, ...]:
    """Returns the implementations of a call, best first, if nothing was measured."""
    return (*OURS.get(generation(device_kind()), ()), "xla")


def _norm(  # noqa: PLR0913 - those of the public functions
    op, x, scale, bias, residual, returns_x, eps, implementation
) -> jax.Array | tuple[jax.Array, jax.Array]:
    check_flag(op, "returns_x", returns_x)
    check_arrays(op, x=x, scale=scale, bias=bias, residual=residual)
    if x is None or scale is None:
        raise ValueError(f"{op}: x and scale are arrays, not None")
    eps = as_number(op, "eps", eps, 0)
    refuse_checked_vma(op, x, scale, bias, residual)
    _check(op, x, scale, bias, residual)
    if returns_x and residual is not None:
        raise ValueError(f"{op}: with a residual it returns the sum; returns_x=False")
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    if 0 in rows:
        raise ValueError(f"{op}: x {x.shape} has no elements")
    refusals = {name: partial(_implementation(name).refusal, rows) for name in candidates()}
    call = NormCall(
        op=op,
        rows=rows[0],
        width=rows[1],
        dtype=str(x.dtype),
        scale=str(scale.dtype),
        bias=None if bias is None else str(bias.dtype),
        residual=None if residual is None else str(residual.dtype),
    )
    name = choose(op, refusals, order(call), implementation, call)
    x_nd = x.reshape(rows)
    residual_nd = None if residual is None else residual.reshape(rows)
    if returns_x and chosen_form(call, WITH_X) == APART:
        y = _norm(op, x, scale, bias, None, False, eps, implementation)
        assert isinstance(y, jax.Array)
        return y, x
    how = _How(eps, op == "layernorm", returns_x or residual is not None, name)
    y, total = _normalise_compiled(how, x_nd, scale, bias, residual_nd)
    y = y.reshape(x.shape)
    return (y, total.reshape(x.shape)) if how.returns_total else y


def _check(op, x, scale, bias, residual) -> None:
    for name, array in (("x", x), ("scale", scale), ("bias", bias), ("residual", residual)):
        if array is not None:
            check_floating(op, name, array)
    width = x.shape[-1:]
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is not None and vector.shape != width:
            raise ValueError(
                f"{op}: {name} must be {width}, the last dim of x {x.shape}, not {vector.shape}"
            )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have the shape of x, {x.shape}, not {residual.shape}"
        )


class _How(NamedTuple):
    """The static part of a call."""

    eps: float
    centred: bool
    returns_total: bool  # x, plus the residual if there is one
    name: str


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(how: _How, x, scale, bias, residual):
    return _forward(how, x, scale, bias, residual)[0]


def _forward(how, x, scale, bias, residual):
    module = _implementation(how.name)
    y, total, mean, rstd = module.forward(x, scale, bias, residual, how.eps, how.centred, how.name)
    # The backward pass needs their dtypes, and whether they exist: an empty array carries both.
    like = [
        None if array is None else jnp.zeros((0,), array.dtype) for array in (x, bias, residual)
    ]
    saved = (total, scale, mean, rstd, like)
    return (y, total if how.returns_total else None), saved


@partial(jax.jit, static_argnums=(0,), inline=True)  # jax 0.10 calls it outside any jit
def _backward(how, saved, gradients):
    total, scale, mean, rstd, (x, bias, residual) = saved
    dy, dtotal = gradients
    module = _implementation(how.name)
    dsum, dscale, dbias = module.backward(total, scale, mean, rstd, dy, dtotal, how.name)
    return (
        dsum.astype(x.dtype),
        dscale.astype(scale.dtype),
        None if bias is None else dbias.astype(bias.dtype),
        None if residual is None else dsum.astype(residual.dtype),
    )


def _implementation(name):
    return IMPLEMENTATIONS[name.removesuffix(INTERPRET).partition(VARIANT)[0]]


_normalise.defvjp(_forward, _backward)
# Compiled once, also outside any jit.
_normalise_compiled = jax.jit(_normalise, static_argnums=(0,), inline=True)
