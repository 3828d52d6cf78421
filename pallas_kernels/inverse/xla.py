"""Implements the inverse in plain JAX, by blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels.calls import InverseCall
from pallas_kernels.choose import not_interpretable


def refusal(call: InverseCall, interpreted: bool) -> str:  # noqa: ARG001
    return not_interpretable(interpreted)


def unit_inverse(lower: jax.Array, name: str) -> jax.Array:  # noqa: ARG001
    """Returns (I + L)^-1 of L [..., n, n].

    For blocks [[A, 0], [C, B]] it is [[A', 0], [-B' C A', B']], and A' and B' are found together.
    Unlike a series of powers of L, it forms no number larger than the inverse has, and unlike
    substitution it consists of matmuls: 2/3 n^3 FLOPs.
    """
    return _unit_inverse(lower)


@jax.custom_vjp
def _unit_inverse(lower: jax.Array) -> jax.Array:
    return _inverse(lower)


def _inverse(lower: jax.Array) -> jax.Array:
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    corner = lower[..., half:, :half]
    first, second = _inverse(jnp.stack((lower[..., :half, :half], lower[..., half:, half:])))
    corner = -_product(second, _product(corner, first))
    upper = jnp.concatenate((first, jnp.zeros_like(first)), -1)
    return jnp.concatenate((upper, jnp.concatenate((corner, second), -1)), -2)


def _forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(lower)
    return inverse, inverse


def _backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_product(transposed, _product(gradient, transposed)), -1),)


_unit_inverse.defvjp(_forward, _backward)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")
