"""Multiplies 8-bit floats with scales from earlier steps ("delayed scaling").

With current scaling (`float8.py`) an array is read twice: for its largest magnitude, and then to be
rounded. Here its scale is known beforehand. A matmul returns the largest magnitudes that it sees as
the gradient of `slots`, an argument that nothing reads, and the next steps scale by them. Numbers
beyond the scale saturate.

Gradients are summed wherever they join, but the sum of two magnitudes is not one. So each layer and
each device has its own slots, and where gradients are accumulated the larger magnitude is taken.
Only a weight that a model multiplies several times in one pass gets the sum, as a bound.

Formats and products are those of `float8.py`. A number that is not finite becomes NaN where it is,
and is no magnitude.

x: values [b, t, ...], w: a weight [i, o], y: their product [b, t, ...], c: parts of the tokens, p:
parts of x or y along the dims after them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.copies import Dot
from spmdtrain.parallel.matmuls import float8
from spmdtrain.parallel.matmuls.float8 import GRADIENTS, VALUES, by_scale
from spmdtrain.parallel.matmuls.local_matmul import Parts


class Operand(NamedTuple):
    """A weight, with the scales of its matmul.

    `scales`: float32 [3], of the values, of the weight and of the product's gradient. `slots`:
    float32 [c, p, 2]; their gradient is the largest magnitude in each part of the values and of the
    product's gradient.
    """

    weight: jax.Array
    scales: jax.Array
    slots: jax.Array

    def of_copies(self) -> "Operand":
        """Returns the operands of a weight [c, ...] of copies: each has its part of the tokens."""
        count = self.weight.shape[0]
        scales = jnp.broadcast_to(self.scales, (count, *self.scales.shape))
        return Operand(self.weight, scales, jnp.expand_dims(self.slots, 1))

    def from_stream(self, parts: Parts) -> Dot:
        """Returns the dot of x [b, t, e], which gives h [b, t, *f]."""
        of_stream, of_wide = counts(parts)
        return partial(tensordot, cut=Cut(x=of_stream, y=of_wide))

    def to_stream(self, parts: Parts) -> Dot:
        """Returns the dot of h [b, t, *f], which gives [b, t, e]."""
        of_stream, of_wide = counts(parts)
        return partial(tensordot, cut=Cut(x=of_wide, y=of_stream))


Counts = tuple[int, ...]  # the parts into which devices split each dim; further dims: 1


@dataclass(frozen=True)
class Cut:
    """The parts of x and of y."""

    x: Counts
    y: Counts


def counts(parts: Parts) -> tuple[Counts, Counts]:
    """Returns the counts of the stream [b, t, e], and of its other side h [b, t, *f]."""
    sizes = jax.sharding.get_abstract_mesh().shape
    of_wide = tuple(math.prod(sizes[axis] for axis in axes_of_dim(dim)) for dim in parts.wide)
    return of_wide[:2], of_wide


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def tensordot(x: jax.Array, operand: Operand, contracted: int, cut: Cut) -> jax.Array:  # noqa: ARG001
    """Returns `jnp.tensordot(x, operand.weight, contracted)` in the dtype of x, and so both
    gradients, multiplied in 8 bits.

    Without a backward pass no magnitudes are recorded, and each array is scaled by its own.
    """
    return float8.tensordot(x, operand.weight, contracted)


def _forward(x: jax.Array, operand: Operand, contracted: int, cut: Cut):
    weight, (of_values, of_weight, of_gradients), slots = operand
    dtypes = jnp.zeros((), x.dtype), jnp.zeros((), weight.dtype)
    x8 = by_scale(x, of_values, VALUES)
    w8 = by_scale(weight, of_weight, VALUES)
    y = float8.dot(x8, w8, range(x.ndim - contracted, x.ndim), range(contracted), x.dtype)
    largest = largest_of_parts(x, cut.x, slots.shape[:2])
    return y, (float8.bits(x8), float8.bits(w8), of_gradients, largest, dtypes)


def _backward(contracted: int, cut: Cut, residuals, dy: jax.Array):
    x_bits, w_bits, of_gradients, of_x, (like_x, like_w) = residuals
    dy8 = by_scale(dy, of_gradients, GRADIENTS)
    x8, w8 = float8.values(x_bits), float8.values(w_bits)
    dx, dw = float8.gradients(x8, w8, dy8, contracted, dy.dtype)
    magnitudes = jnp.stack([of_x, largest_of_parts(dy, cut.y, of_x.shape)], -1)
    of_operand = Operand(dw.astype(like_w.dtype), jnp.zeros(3), magnitudes)
    return dx.astype(like_x.dtype), of_operand


tensordot.defvjp(_forward, _backward)


def largest_of_parts(x: jax.Array, counts: Counts, shape: Sequence[int]) -> jax.Array:
    """Returns the largest magnitude in each of the [c, p] parts of x, float32; 0 if not finite.

    Dims that are not in c parts, or together in p, count as whole.
    """
    _, time, *others = (*counts, *[1] * (x.ndim - len(counts)))
    time = time if time == shape[0] else 1
    others = others if math.prod(others) == shape[1] else [1] * len(others)
    dims, over = [], []
    for size, count in zip(x.shape, (1, time, *others), strict=True):
        dims += [count] if count > 1 else []
        over.append(len(dims))
        dims.append(size // count)
    largest = jnp.abs(x).reshape(dims).max(over).astype(jnp.float32)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.broadcast_to(largest.reshape(time, math.prod(others)), shape)
