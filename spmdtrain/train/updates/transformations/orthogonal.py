"""Computes the orthogonal factor of a matrix by QR decomposition."""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


@custom_vmap
def orthogonal_part(x_nn: jax.Array) -> jax.Array:
    """Returns Q of x = Q R, of each matrix of a stack [*stack, n, n], up to the signs of columns.

    On CPUs the matrices of a stack take turns. LAPACK's call for a stack divides it among XLA's
    threads and waits for them on one of these threads: as many such calls as threads, of several
    weights, would wait for ever (jax 0.10 to 0.12).
    """
    if x_nn.ndim == 2:
        return _of_all(x_nn)
    return jax.lax.platform_dependent(x_nn, cpu=_in_turn, default=_of_all)


@orthogonal_part.def_vmap
def _of_stack(size: int, batched: list, x_nn: jax.Array) -> tuple[jax.Array, bool]:  # noqa: ARG001
    return orthogonal_part(x_nn), True


def _of_all(x_nn: jax.Array) -> jax.Array:
    return jnp.linalg.qr(x_nn)[0]


def _in_turn(x_nn: jax.Array) -> jax.Array:
    return jax.lax.map(_of_all, x_nn.reshape(-1, *x_nn.shape[-2:])).reshape(x_nn.shape)
