"""Matmuls that gather or scatter tokens piece by piece, beside their own work.

This is the collective matmul of Wang et al. (ASPLOS 2023, "Overlap Communication with Dependent
Computation via Decomposition"). An all-gather that feeds a matmul, and a matmul that feeds a
reduce-scatter, are cut into n pieces around a ring of n devices: a device multiplies the piece that
it has while another one travels. XLA sees permutes that nothing waits for, and lets them run beside
the matmuls.

A weight comes as copies, one for each part of the tokens that another axis splits (`copies.py`).

b: sequences, t: tokens of this device when it has them all, e: width of the residual stream,
f: the dims behind it (heads, ffn), of which a device has its own part, c: copies of a weight.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import locally
from spmdtrain.parallel.specs import axes_of_dim


@dataclass(frozen=True)
class Ring:
    """The devices along `axis`, and where the arrays of a matmul rest.

    stream: of x [b, t, e]; `axis` is the minor axis that splits its tokens.
    wide: of h [b, t, *f]; `axis` splits one of f, and no token.
    """

    axis: str
    stream: P
    wide: P

    @property
    def size(self) -> int:
        return jax.sharding.get_abstract_mesh().shape[self.axis]

    @property
    def column(self) -> P:
        """The spec of a weight [c, e, *f]."""
        return P(self.token_axes or None, None, *self.wide[2:])

    @property
    def row(self) -> P:
        """The spec of a weight [c, *f, e]."""
        return P(self.token_axes or None, *self.wide[2:], None)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes whose devices have different tokens, and each a copy of a weight."""
        return (*axes_of_dim(self.wide[0]), *axes_of_dim(self.wide[1]))

    def copy(self, weight: jax.Array) -> jax.Array:
        """The copies [c, ...] of a weight; their gradients are summed on the way back."""
        sizes = jax.sharding.get_abstract_mesh().shape
        count = math.prod(sizes[axis] for axis in self.token_axes)
        return jnp.broadcast_to(weight, (count, *weight.shape))


def gather_matmul(x: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    """`x @ weight` [b, t, *f], from x [b, t, e], whose tokens are gathered, and weight
    [c, e, *f].
    """
    product: Any = _gather_and_multiply(x, weight, ring)
    return product


def matmul_scatter(h: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    """`h @ weight` [b, t, e], summed over the ring, its tokens scattered; weight [c, *f, e]."""
    product: Any = _multiply_and_scatter(h, weight, ring)
    return product


# Column-parallel: from the stream to f


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_and_multiply(x: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    def local(x: jax.Array, weight: jax.Array) -> jax.Array:
        y, _ = _gather_pieces(x, _as_matrix(weight, 1), ring)
        return y.reshape(*y.shape[:2], *weight.shape[2:])

    return locally(local, (ring.stream, ring.column), ring.wide)(x, weight)


def _gather_and_multiply_forward(x: jax.Array, weight: jax.Array, ring: Ring):
    # A device keeps its own tokens, and gathers again in the backward (arXiv:2205.05198, 4.2.2).
    return _gather_and_multiply(x, weight, ring), (x, weight)


def _gather_and_multiply_backward(ring: Ring, kept, dy: jax.Array):
    def local(x: jax.Array, weight: jax.Array, dy: jax.Array):
        dy = _as_matrices(dy)
        dx, whole = _scatter_and_gather_pieces(dy, _as_matrix(weight, 1).T, x, ring)
        return dx, _weight_gradient(whole, dy, weight)

    specs = (ring.stream, ring.column, ring.wide)
    return locally(local, specs, (ring.stream, ring.column))(*kept, dy)


_gather_and_multiply.defvjp(_gather_and_multiply_forward, _gather_and_multiply_backward)


# Row-parallel: from f back to the stream


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply_and_scatter(h: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    def local(h: jax.Array, weight: jax.Array) -> jax.Array:
        return _scatter_pieces(_as_matrices(h), _as_matrix(weight, weight.ndim - 2), ring)

    return locally(local, (ring.wide, ring.row), ring.stream)(h, weight)


def _multiply_and_scatter_forward(h: jax.Array, weight: jax.Array, ring: Ring):
    return _multiply_and_scatter(h, weight, ring), (h, weight)


def _multiply_and_scatter_backward(ring: Ring, kept, dy: jax.Array):
    def local(h: jax.Array, weight: jax.Array, dy: jax.Array):
        matrix = _as_matrix(weight, weight.ndim - 2)
        dh, whole = _gather_pieces(dy, matrix.T, ring)
        return dh.reshape(h.shape), _weight_gradient(_as_matrices(h), whole, weight)

    specs = (ring.wide, ring.row, ring.stream)
    return locally(local, specs, (ring.wide, ring.row))(*kept, dy)


_multiply_and_scatter.defvjp(_multiply_and_scatter_forward, _multiply_and_scatter_backward)


# On one device: arrays are its own parts, a weight is its one copy, as a matrix


def _gather_pieces(x: jax.Array, matrix: jax.Array, ring: Ring) -> tuple[jax.Array, jax.Array]:
    """`x @ matrix` of the tokens of all devices [b, t, f], and x of them all [b, t, e].

    Pieces go around downwards: device i multiplies those of i, i + 1, ...
    """
    here = jax.lax.axis_index(ring.axis)
    batch, rows, width = x.shape
    y = jnp.zeros((batch, ring.size * rows, matrix.shape[1]), x.dtype)
    whole = jnp.zeros((batch, ring.size * rows, width), x.dtype)
    piece = x
    for hop in range(ring.size):
        # The next piece sets out together with the matmul of this one. Left to itself, XLA's
        # scheduler lets all pieces travel first, one after another.
        y, piece = jax.lax.optimization_barrier((y, piece))
        following = _pass_on(piece, ring, -1) if hop < ring.size - 1 else piece
        y = _put(y, piece @ matrix, here + hop, ring)
        whole = _put(whole, piece, here + hop, ring)
        piece = following
    return y, whole


def _scatter_pieces(h: jax.Array, matrix: jax.Array, ring: Ring) -> jax.Array:
    """This device's tokens of the sum over all devices of `h @ matrix` [b, t / n, e].

    The sum of a piece goes around upwards, and ends on the device that it belongs to.
    """
    here = jax.lax.axis_index(ring.axis)
    total = _take(h, here - 1, ring) @ matrix
    for hop in range(1, ring.size):
        total, part = _matmul_beside(total, _take(h, here - 1 - hop, ring), matrix)
        total = _pass_on(total, ring, 1) + part
    return total


def _scatter_and_gather_pieces(
    h: jax.Array, matrix: jax.Array, x: jax.Array, ring: Ring
) -> tuple[jax.Array, jax.Array]:
    """`_scatter_pieces`, and x [b, t / n, e] of all devices, which travels with the sums.

    Together, because XLA lets no two transfers between the same devices run side by side.
    """
    here = jax.lax.axis_index(ring.axis)
    batch, rows, width = x.shape
    whole = _put(jnp.zeros((batch, ring.size * rows, width), x.dtype), x, here, ring)
    total = _take(h, here - 1, ring) @ matrix
    for hop in range(1, ring.size):
        both, part = _matmul_beside(jnp.stack([total, x]), _take(h, here - 1 - hop, ring), matrix)
        total, x = _pass_on(both, ring, 1)
        whole = _put(whole, x, here - hop, ring)
        total = total + part
    return total, whole


def _matmul_beside(
    cargo: jax.Array, x: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`cargo`, ready to set out, and `x @ matrix`, which begins then, to be added on its arrival.

    An addition inside the matmul, as XLA would have it, would wait for the arrival.
    """
    cargo, x = jax.lax.optimization_barrier((cargo, x))
    return cargo, jax.lax.optimization_barrier(x @ matrix)


def _pass_on(x: jax.Array, ring: Ring, step: int) -> jax.Array:
    """x of the device `step` places before this one."""
    places = range(ring.size)
    return jax.lax.ppermute(x, ring.axis, [(at, (at + step) % ring.size) for at in places])


def _take(x: jax.Array, place: jax.Array, ring: Ring) -> jax.Array:
    """The tokens of x [b, t, ...] that belong to device `place`, counted around the ring."""
    rows = x.shape[1] // ring.size
    return jax.lax.dynamic_slice_in_dim(x, place % ring.size * rows, rows, 1)


def _put(x: jax.Array, piece: jax.Array, place: jax.Array, ring: Ring) -> jax.Array:
    """x [b, t, ...] with `piece` as the tokens of device `place`, counted around the ring."""
    start = place % ring.size * piece.shape[1]
    return jax.lax.dynamic_update_slice_in_dim(x, piece, start, 1)


def _weight_gradient(x: jax.Array, dy: jax.Array, weight: jax.Array) -> jax.Array:
    """The gradient of `x @ weight`, from the tokens that are here."""
    return jnp.einsum("bti,bto->io", x, dy).reshape(weight.shape)


def _as_matrix(weight: jax.Array, rows: int) -> jax.Array:
    """The one copy of a weight that is here, with its first `rows` dims as one, and the others
    as one.
    """
    return weight.reshape(math.prod(weight.shape[1 : 1 + rows]), -1)


def _as_matrices(h: jax.Array) -> jax.Array:
    """h [b, t, *f] as [b, t, f]."""
    return h.reshape(*h.shape[:2], -1)
