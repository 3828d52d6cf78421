"""Finds the orthogonal part of a matrix by a QR."""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


@custom_vmap
def orthogonal_part(x_nn: jax.Array) -> jax.Array:
    """Returns Q of x = Q R, where the diagonal of R is positive; [*stack, n, n].

    So a column of Q points to the side of x's column, and moves little if x does.

    On CPUs the matrices of a stack have their turn. LAPACK's calls of a stack divide it among
    XLA's threads and wait for them, each on one of these threads: as many calls as threads wait
    for ever (jax 0.10 to 0.12).
    """
    if x_nn.ndim == 2:
        return _of_one(x_nn)
    return jax.lax.platform_dependent(x_nn, cpu=_in_turn, default=_of_one)


@orthogonal_part.def_vmap
def _of_stack(size: int, batched: list, x_nn: jax.Array) -> tuple[jax.Array, bool]:  # noqa: ARG001
    return orthogonal_part(x_nn), True


def _of_one(x_nn: jax.Array) -> jax.Array:
    q_nn, r_nn = jnp.linalg.qr(x_nn)
    diagonal_n = jnp.diagonal(r_nn, axis1=-2, axis2=-1)
    return q_nn * jnp.where(diagonal_n < 0, -1, 1)[..., None, :]


def _in_turn(x_nn: jax.Array) -> jax.Array:
    return jax.lax.map(_of_one, x_nn.reshape(-1, *x_nn.shape[-2:])).reshape(x_nn.shape)
