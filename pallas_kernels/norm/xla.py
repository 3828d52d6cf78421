"""Implements the norms in plain JAX.

The backward pass needs the sum that was normalised and its statistics, which are in float32.
Letters: n rows, d width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.choose import not_interpretable
from pallas_kernels.wide import rounded, widen


def refusal(rows: tuple[int, int], interpreted: bool) -> str:  # noqa: ARG001
    return not_interpretable(interpreted)


def forward(x, scale, bias, residual, epsilon: float, centred: bool, name: str):  # noqa: ARG001
    """Returns (y [n, d], total [n, d], mean [n] or None, reciprocal standard deviation [n]).

    x is [n, d]. `total` is x + residual, which is normalised; `centred`: LayerNorm.
    """
    total = x
    if residual is not None:
        total = rounded(widen(x) + widen(residual), residual.dtype)
    normal = widen(total)
    mean = None
    if centred:
        mean = normal.mean(-1)
        normal = normal - mean[:, None]
        # The mean of a row far from 0 is rounded coarsely, and subtracting it leaves a remainder.
        # The remainder is summed along with the squares, so the row is not read once more.
        remainder = normal.mean(-1)
        variance = jnp.square(normal).mean(-1) - remainder * remainder
        variance = jnp.maximum(variance, 0)  # rounding may leave it below 0 in a constant row
        normal = normal - remainder[:, None]
        mean = mean + remainder
    else:
        variance = jnp.square(normal).mean(-1)
    rstd = jax.lax.rsqrt(variance + epsilon)
    y = normal * rstd[:, None] * widen(scale)
    if bias is not None:
        y = y + widen(bias)
    return y.astype(x.dtype), total, mean, rstd


def backward(total, scale, mean, rstd, dy, dtotal, name: str):  # noqa: ARG001
    """Returns (dsum [n, d] in float32, dscale [d], dbias [d]).

    `dtotal` is the gradient of the sum that `forward` returns, or None. dsum is the gradient of
    both x and the residual.
    """
    dy = widen(dy)
    normal = widen(total)
    if mean is not None:
        normal = normal - mean[:, None]
    normal = normal * rstd[:, None]
    dnormal = dy * widen(scale)
    # y does not change when x moves along the normalised row or, for LayerNorm, along (1, ..., 1):
    # the gradient has no part along them.
    dsum = dnormal - normal * (dnormal * normal).mean(-1, keepdims=True)
    if mean is not None:
        dsum = dsum - dnormal.mean(-1, keepdims=True)
    dsum = dsum * rstd[:, None]
    if dtotal is not None:
        dsum = dsum + widen(dtotal)
    dscale = (dy * normal).sum(0)
    dbias = dy.sum(0)
    return dsum, dscale, dbias
