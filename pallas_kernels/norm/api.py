"""`layernorm` and `rmsnorm`: one derivative rule, several implementations."""

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.choose import choose
from pallas_kernels.norm import triton, xla
from pallas_kernels.partition import unchecked

IMPLEMENTATIONS = {"xla": xla, "triton": triton}
PREFERENCE = ("xla",)  # no other was measured to be faster yet


def layernorm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """LayerNorm (arXiv:1607.06450) over the last dim: (x - mean) / sqrt(variance + eps) * scale + bias, in x's dtype.

    With `residual`, of x's shape: (y, sum), where sum = x + residual, in the residual's dtype, is what is normalised.
    Statistics, and the gradients of scale and bias until they are rounded to their dtypes, are float32.
    """
    return _norm("layernorm", x, scale, bias, residual, eps, implementation)


def rmsnorm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """RMSNorm (arXiv:1910.07467) over the last dim: x / sqrt(mean(x^2) + eps) * scale + bias; else as layernorm."""
    return _norm("rmsnorm", x, scale, bias, residual, eps, implementation)


def _norm(op, x, scale, bias, residual, eps, implementation):
    unchecked(op, x, scale, bias, residual)
    for name, each in (("x", x), ("scale", scale), ("bias", bias), ("residual", residual)):
        if each is not None and not jnp.issubdtype(each.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} is {each.dtype}, not floating")
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
    rows = math.prod(x.shape[:-1]), *width
    if 0 in rows:
        raise ValueError(f"{op}: x {x.shape} has no elements")
    refusals = {name: partial(module.refusal, rows) for name, module in IMPLEMENTATIONS.items()}
    name = choose(op, refusals, PREFERENCE, implementation)
    flat = [None if each is None else each.reshape(rows) for each in (x, residual)]
    y, total = _normalise_compiled(
        float(eps), op == "layernorm", name, flat[0], scale, bias, flat[1]
    )
    y = y.reshape(x.shape)
    return y if residual is None else (y, total.reshape(x.shape))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _normalise(eps, centred, name, x, scale, bias, residual):
    return _forward(eps, centred, name, x, scale, bias, residual)[0]


def _forward(eps, centred, name, x, scale, bias, residual):
    module = IMPLEMENTATIONS[name.partition(":")[0]]
    y, total, mean, rstd = module.forward(x, scale, bias, residual, eps, centred, name)
    # of dtypes and of what is there, an empty array each
    like = [None if each is None else jnp.zeros((0,), each.dtype) for each in (x, bias, residual)]
    return (y, total if residual is not None else None), (total, scale, mean, rstd, like)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)  # jax 0.10 calls it outside any jit
def _backward(_eps, _centred, name, kept, gradients):
    (total, scale, mean, rstd, (x, bias, residual)), (dy, dtotal) = kept, gradients
    module = IMPLEMENTATIONS[name.partition(":")[0]]
    dsum, dscale, dbias = module.backward(total, scale, mean, rstd, dy, dtotal, name)
    return (
        dsum.astype(x.dtype),
        dscale.astype(scale.dtype),
        None if bias is None else dbias.astype(bias.dtype),
        None if residual is None else dsum.astype(residual.dtype),
    )


_normalise.defvjp(_forward, _backward)
_normalise_compiled = jax.jit(
    _normalise, static_argnums=(0, 1, 2), inline=True
)  # once, also outside any jit
