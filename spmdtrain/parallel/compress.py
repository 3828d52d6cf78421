"""Sums gradients over a mesh axis in 8 bits a number, as ZeRO++ does (arXiv:2306.10209).

Each device encodes the parts that others sum, sends them there in one all-to-all, decodes what
arrives and sums it in float32. For a whole gradient it also encodes its sum, and all devices gather
the sums. So a number is rounded at most twice, however many devices there are, and no sum
overflows.

A block of numbers shares one scale: its largest magnitude over the largest number of the codec.
Numbers are rounded to nearest, without error feedback: its state would take 4 bytes a weight on
each device, which ZeRO-1 has just saved, and with 8 bits training does not need it
(docs/compression.md).

If a number is not finite, its block's scale is infinite and its block NaN, which the guards see.

n: devices along the axis, c: numbers in a row, b: numbers in a block.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Format = Literal["int8", "float8"]

# The largest number of each format; float8 is e4m3, whose 3 bits of mantissa suffice with a scale.
_DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "float8": 448.0}


class EightBits(NamedTuple):
    """The encoding of rows in 8 bits."""

    bits_nc: jax.Array  # uint8: collectives move bits, which every platform can
    scales_nb: jax.Array  # float32, one for each block; the numbers are bits * scale


@dataclass(frozen=True)
class Codec:
    """The encoding of numbers in 8 bits, with one float32 scale for each `block` of them."""

    format: Format
    block: int

    def encode(self, rows_nc: jax.Array) -> EightBits:
        """Encodes float32 rows; `block` divides their length."""
        blocks = rows_nc.reshape(rows_nc.shape[0], -1, self.block)
        top, dtype = _LARGEST[self.format], _DTYPES[self.format]
        # XLA's maximum on CPU may lose a NaN, but not an infinity.
        largest = jnp.max(jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf), axis=-1)
        # A scale below the smallest normal number would be flushed to 0, and its block with it.
        scales_nb = jnp.maximum(largest / top, jnp.finfo(jnp.float32).tiny)
        numbers = blocks / scales_nb[..., None]
        if self.format == "int8":
            numbers = jnp.round(numbers)
        numbers = jnp.clip(numbers, -top, top).astype(dtype).reshape(rows_nc.shape)
        return EightBits(jax.lax.bitcast_convert_type(numbers, jnp.uint8), scales_nb)

    def decode(self, encoded: EightBits) -> jax.Array:
        """Returns the float32 rows [n, c] of `encode`."""
        numbers = jax.lax.bitcast_convert_type(encoded.bits_nc, _DTYPES[self.format])
        blocks = numbers.astype(jnp.float32).reshape(*encoded.scales_nb.shape, self.block)
        return (blocks * encoded.scales_nb[..., None]).reshape(encoded.bits_nc.shape)


def compressed_sum(x: jax.Array, axis: str, codec: Codec) -> jax.Array:
    """Returns the sum of x over a manual mesh axis, bit for bit the same on all its devices."""
    ways = jax.lax.axis_size(axis)
    rows_nc = _rows(x.reshape(-1), ways, codec.block)
    own = codec.encode(_sum_of_own_row(rows_nc, axis, codec)[None])
    # The device that computed a sum also uses the encoded one; otherwise its weights would diverge.
    gather = partial(jax.lax.all_gather, axis_name=axis, axis=0, tiled=True)
    whole = codec.decode(EightBits(*map(gather, own)))
    return whole.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)


def compressed_scatter(x: jax.Array, axis: str, dim: int, codec: Codec) -> jax.Array:
    """Returns this device's slice, of dim `dim`, of the sum of x over a manual mesh axis."""
    ways = jax.lax.axis_size(axis)
    first = jnp.moveaxis(x, dim, 0)
    slices = first.reshape(ways, -1)
    padding = -slices.shape[1] % codec.block
    summed = _sum_of_own_row(jnp.pad(slices, ((0, 0), (0, padding))), axis, codec)
    shape = (first.shape[0] // ways, *first.shape[1:])
    return jnp.moveaxis(summed[: slices.shape[1]].reshape(shape), 0, dim).astype(x.dtype)


def _rows(x: jax.Array, ways: int, block: int) -> jax.Array:
    """Returns x [size] as rows, one for each device, padded with zeros to whole blocks."""
    return jnp.pad(x, (0, -x.size % (ways * block))).reshape(ways, -1)


def _sum_of_own_row(rows_nc: jax.Array, axis: str, codec: Codec) -> jax.Array:
    """Sends each device its row, and returns the float32 sum of those that arrive here."""
    exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    arrived = EightBits(*map(exchange, codec.encode(rows_nc.astype(jnp.float32))))
    return codec.decode(arrived).sum(axis=0)
