"""Chooses which elements of one matrix stay, by magnitude; the others become zero.

Of two elements of the same magnitude the first stays, in row-major order. Choices come from
comparisons and from sums of integers, which are exact in every order: the same numbers give the
same choice on every mesh. An element that is not a number counts as the largest of all: it stays,
and so is noticed.
"""

import jax
import jax.numpy as jnp

BITS = 31  # of a magnitude, whose sign is 0, and of an index


def largest(x: jax.Array, count: jax.Array | int) -> jax.Array:
    """Returns a bool array that is True for the `count` largest elements of x.

    Bit by bit it finds the largest threshold that so many elements reach, and the index up to which
    elements at the threshold stay. So nothing is sorted, and devices exchange one number a bit.
    """
    assert x.size < 2**BITS, "indices and counts are int32"
    magnitude = magnitudes(x)
    threshold = _largest(lambda bits: jnp.sum(magnitude >= bits) >= count)
    above, equal = magnitude > threshold, magnitude == threshold
    index = _indices(x.shape)
    of_equal = count - jnp.sum(above)
    stop = _largest(lambda bits: jnp.sum(equal & (index < bits)) <= of_equal)
    return above | (equal & (index < stop))


def largest_of_each(x: jax.Array, count: int, size: int, dim: int) -> jax.Array:
    """Returns a bool array that is True for the `count` largest of each `size` elements in a row
    along `dim`, which `size` divides.
    """
    shape = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    groups = jnp.moveaxis(magnitudes(x).reshape(shape), dim + 1, -1)
    place = jnp.arange(size)
    mine, other = groups[..., :, None], groups[..., None, :]
    precedes = (other > mine) | ((other == mine) & (place < place[:, None]))
    stays = jnp.sum(precedes, -1) < count
    return jnp.moveaxis(stays, -1, dim + 1).reshape(x.shape)


def magnitudes(x: jax.Array) -> jax.Array:
    """Returns int32 numbers in the order of the magnitudes of a floating x."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & jnp.int32(2**BITS - 1)


def _largest(holds) -> jax.Array:
    """Returns the largest int32 for which `holds` is True, one bit at a time.

    `holds` must be True for 0 and for every number up to the result.
    """

    def with_bit(at: jax.Array, bits: jax.Array) -> jax.Array:
        more = bits | (jnp.int32(1) << (BITS - 1 - at))
        return jnp.where(holds(more), more, bits)

    return jax.lax.fori_loop(0, BITS, with_bit, jnp.int32(0))


def _indices(shape: tuple[int, ...]) -> jax.Array:
    """Returns the row-major index of each element."""
    index = jnp.zeros(shape, jnp.int32)
    stride = 1
    for dim in reversed(range(len(shape))):
        index += stride * jax.lax.broadcasted_iota(jnp.int32, shape, dim)
        stride *= shape[dim]
    return index
