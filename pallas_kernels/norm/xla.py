"""The norms in plain JAX. Backward starts from the sum and one statistic or two per row, in float32."""

import jax
import jax.numpy as jnp


def refusal(rows: tuple[int, int], interpreted: bool) -> str:  # noqa: ARG001
    return "has no interpreted form" if interpreted else ""


def forward(x, scale, bias, residual, epsilon: float, centred: bool, name: str):  # noqa: ARG001
    """x [n, d] -> (y [n, d], sum [n, d], mean [n] or None, 1 / deviation [n])."""
    total = x if residual is None else (_wide(x) + _wide(residual)).astype(residual.dtype)
    wide, mean = _wide(total), None
    if centred:
        mean = wide.mean(-1)
        wide = wide - mean[:, None]
        # The mean of a row far from 0 is rounded coarsely. What is left of it is summed along with the squares: no
        # reading more.
        left = wide.mean(-1)
        square = jnp.maximum(
            jnp.square(wide).mean(-1) - left * left, 0
        )  # of equal numbers it may round below
        wide, mean = wide - left[:, None], mean + left
    else:
        square = jnp.square(wide).mean(-1)
    rstd = jax.lax.rsqrt(square + epsilon)
    y = wide * rstd[:, None] * _wide(scale)
    return (y if bias is None else y + _wide(bias)).astype(x.dtype), total, mean, rstd


def backward(total, scale, mean, rstd, dy, dtotal, name: str):  # noqa: ARG001
    """(dsum [n, d] in float32, dscale [d], sum of dy [d]); `dtotal`: the gradient that reaches the sum by itself."""
    dy, wide = _wide(dy), _wide(total)
    normal = (wide if mean is None else wide - mean[:, None]) * rstd[:, None]
    dnormal = dy * _wide(scale)
    dsum = dnormal - normal * (dnormal * normal).mean(-1, keepdims=True)
    if mean is not None:
        dsum = dsum - dnormal.mean(-1, keepdims=True)
    dsum = dsum * rstd[:, None]
    return dsum if dtotal is None else dsum + _wide(dtotal), (dy * normal).sum(0), dy.sum(0)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
