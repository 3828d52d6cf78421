"""Multiplies while it gathers or scatters tokens, piece by piece.

This is the collective matmul of Wang et al. (ASPLOS 2023, "Overlap Communication with Dependent
Computation via Decomposition"). An all-gather that feeds a matmul, and a matmul that feeds a
reduce-scatter, are cut into n pieces around a ring of n devices: a device multiplies the piece that
it has while the next one travels. XLA sees permutes that nothing waits for, and overlaps them with
the matmuls.

A weight comes as copies, one for each part of the tokens that another axis splits (`copies.py`).

b: sequences, t: tokens of a device that has gathered them all, e: width of the residual stream, f:
the other dims of the weight (heads, ffn), of which a device has its own part, c: copies of a
weight.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import locally
from spmdtrain.config.schema import Narrow
from spmdtrain.parallel.matmuls import float8, mxfp8
from spmdtrain.parallel.matmuls.local_matmul import Parts


@dataclass(frozen=True, kw_only=True)
class Ring(Parts):
    """The devices along `axis`, and the specs of a matmul's arrays.

    stream: of x [b, t, e]; `axis` is the minor axis that splits its tokens.
    wide: of h [b, t, *f]; `axis` splits one of f, and not the tokens.
    narrow: the 8-bit floats in which pieces are multiplied, each scaled by itself.
    """

    axis: str
    stream: P
    narrow: Narrow | None = None

    @property
    def size(self) -> int:
        return jax.sharding.get_abstract_mesh().shape[self.axis]

    def gather_matmul(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns `x @ weight` [b, t, *f], gathering the tokens of x [b, t, e].

        weight: [c, e, *f].
        """
        product: Any = _gather_and_multiply(x, weight, self)
        return product

    def matmul_scatter(self, h: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns `h @ weight` [b, t, e], summed over the ring, tokens scattered.

        weight: [c, *f, e].
        """
        product: Any = _multiply_and_scatter(h, weight, self)
        return product


# Column-parallel: from the stream to f


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_and_multiply(x: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    def local(x: jax.Array, weight: jax.Array) -> jax.Array:
        y, _ = _gather_pieces(x, _as_matrix(weight, 1), ring, float8.VALUES)
        return y.reshape(*y.shape[:2], *weight.shape[2:])

    return locally(local, (ring.stream, ring.column), ring.wide)(x, weight)


def _gather_and_multiply_forward(x: jax.Array, weight: jax.Array, ring: Ring):
    # A device keeps its own tokens, and gathers again in the backward (arXiv:2205.05198, 4.2.2).
    return _gather_and_multiply(x, weight, ring), (x, weight)


def _gather_and_multiply_backward(ring: Ring, residuals, dy: jax.Array):
    def local(x: jax.Array, weight: jax.Array, dy: jax.Array):
        dy = _as_matrices(dy)
        dx, whole = _scatter_and_gather_pieces(dy, _as_matrix(weight, 1).T, x, ring)
        return dx, _weight_gradient(whole, dy, weight, ring)

    specs = (ring.stream, ring.column, ring.wide)
    return locally(local, specs, (ring.stream, ring.column))(*residuals, dy)


_gather_and_multiply.defvjp(_gather_and_multiply_forward, _gather_and_multiply_backward)


# Row-parallel: from f back to the stream


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply_and_scatter(h: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    def local(h: jax.Array, weight: jax.Array) -> jax.Array:
        return _scatter_pieces(_as_matrices(h), _as_matrix(weight, weight.ndim - 2), ring)

    return locally(local, (ring.wide, ring.row), ring.stream)(h, weight)


def _multiply_and_scatter_forward(h: jax.Array, weight: jax.Array, ring: Ring):
    return _multiply_and_scatter(h, weight, ring), (h, weight)


def _multiply_and_scatter_backward(ring: Ring, residuals, dy: jax.Array):
    def local(h: jax.Array, weight: jax.Array, dy: jax.Array):
        matrix = _as_matrix(weight, weight.ndim - 2)
        dh, whole = _gather_pieces(dy, matrix.T, ring, float8.GRADIENTS)
        return dh.reshape(h.shape), _weight_gradient(_as_matrices(h), whole, weight, ring)

    specs = (ring.wide, ring.row, ring.stream)
    return locally(local, specs, (ring.wide, ring.row))(*residuals, dy)


_multiply_and_scatter.defvjp(_multiply_and_scatter_forward, _multiply_and_scatter_backward)


# On one device: arrays are its own parts, and a weight is its own copy, as a matrix


def _gather_pieces(
    x: jax.Array, matrix: jax.Array, ring: Ring, numbers: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns `x @ matrix` [b, t, f] for the tokens of all devices, and their x [b, t, e].

    Pieces travel down the ring: device i multiplies those of i, i + 1, ...
    `numbers`: the format of x in float8.
    """
    here = jax.lax.axis_index(ring.axis)
    batch, rows, width = x.shape
    y = jnp.zeros((batch, ring.size * rows, matrix.shape[1]), x.dtype)
    whole = jnp.zeros((batch, ring.size * rows, width), x.dtype)
    piece = x
    for hop in range(ring.size):
        # The next piece is sent as the matmul of this one begins. Left to itself, XLA's scheduler
        # sends all pieces first, one after another.
        y, piece = jax.lax.optimization_barrier((y, piece))
        following = _pass_on(piece, ring, -1) if hop < ring.size - 1 else piece
        y = _put(y, _multiply(piece, matrix, ring, numbers), here + hop, ring)
        whole = _put(whole, piece, here + hop, ring)
        piece = following
    return y, whole


def _scatter_pieces(h: jax.Array, matrix: jax.Array, ring: Ring) -> jax.Array:
    """Returns this device's tokens of `h @ matrix` summed over all devices, [b, t / n, e].

    The sum of a piece travels up the ring, and ends on the device that it belongs to.
    """
    here = jax.lax.axis_index(ring.axis)
    multiply = partial(_multiply, matrix=matrix, ring=ring, numbers=float8.VALUES)
    total = multiply(_take(h, here - 1, ring))
    for hop in range(1, ring.size):
        total, part = _matmul_beside(total, _take(h, here - 1 - hop, ring), multiply)
        total = _pass_on(total, ring, 1) + part
    return total


def _scatter_and_gather_pieces(
    dy: jax.Array, matrix: jax.Array, x: jax.Array, ring: Ring
) -> tuple[jax.Array, jax.Array]:
    """Returns `_scatter_pieces` of a gradient, and x of all devices, which travels with the sums.

    They travel together, because XLA never runs two transfers between the same devices in parallel.
    """
    here = jax.lax.axis_index(ring.axis)
    batch, rows, width = x.shape
    whole = _put(jnp.zeros((batch, ring.size * rows, width), x.dtype), x, here, ring)
    multiply = partial(_multiply, matrix=matrix, ring=ring, numbers=float8.GRADIENTS)
    total = multiply(_take(dy, here - 1, ring))
    for hop in range(1, ring.size):
        piece = _take(dy, here - 1 - hop, ring)
        both, part = _matmul_beside(jnp.stack([total, x]), piece, multiply)
        total, x = _pass_on(both, ring, 1)
        whole = _put(whole, x, here - hop, ring)
        total = total + part
    return total, whole


def _matmul_beside(
    cargo: jax.Array, piece: jax.Array, multiply: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns `cargo`, ready to send, and the product of `piece`, computed during its transfer.

    The two are added on arrival: XLA would fuse the addition into the matmul, which would then
    wait.
    """
    cargo, piece = jax.lax.optimization_barrier((cargo, piece))
    return cargo, jax.lax.optimization_barrier(multiply(piece))


def _multiply(piece: jax.Array, matrix: jax.Array, ring: Ring, numbers: Any) -> jax.Array:
    if ring.narrow is None:
        return piece @ matrix
    if ring.narrow == "mxfp8":
        return mxfp8.matmul(piece, matrix)
    a, b = float8.scaled(piece, numbers), float8.scaled(matrix, float8.VALUES)
    return float8.dot(a, b, (piece.ndim - 1,), (0,), piece.dtype)


def _pass_on(x: jax.Array, ring: Ring, step: int) -> jax.Array:
    """Returns x of the device `step` places earlier in the ring."""
    places = range(ring.size)
    return jax.lax.ppermute(x, ring.axis, [(at, (at + step) % ring.size) for at in places])


def _take(x: jax.Array, place: jax.Array, ring: Ring) -> jax.Array:
    """Returns the tokens of x [b, t, ...] that belong to device `place`, modulo the ring size."""
    rows = x.shape[1] // ring.size
    return jax.lax.dynamic_slice_in_dim(x, place % ring.size * rows, rows, 1)


def _put(x: jax.Array, piece: jax.Array, place: jax.Array, ring: Ring) -> jax.Array:
    """Returns x [b, t, ...] with `piece` as the tokens of device `place`, modulo the ring size."""
    start = place % ring.size * piece.shape[1]
    return jax.lax.dynamic_update_slice_in_dim(x, piece, start, 1)


def _weight_gradient(x: jax.Array, dy: jax.Array, weight: jax.Array, ring: Ring) -> jax.Array:
    """Returns the gradient of `x @ weight` from this device's tokens."""
    if ring.narrow is None:
        return jnp.einsum("bti,bto->io", x, dy).reshape(weight.shape)
    if ring.narrow == "mxfp8":
        return mxfp8.weight_gradient(x, dy).reshape(weight.shape)
    a, b = float8.scaled(x, float8.VALUES), float8.scaled(dy, float8.GRADIENTS)
    return float8.dot(a, b, (0, 1), (0, 1), dy.dtype).reshape(weight.shape)


def _as_matrix(weight: jax.Array, rows: int) -> jax.Array:
    """Returns this device's copy of a weight as a matrix: its first `rows` dims become the rows."""
    return weight.reshape(math.prod(weight.shape[1 : 1 + rows]), -1)


def _as_matrices(h: jax.Array) -> jax.Array:
    """Returns h [b, t, *f] as [b, t, f]."""
    return h.reshape(*h.shape[:2], -1)
