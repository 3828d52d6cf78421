"""Sums gradients over a mesh axis in 8 bits a number, as ZeRO++ does (arXiv:2306.10209).

Each device encodes the parts that others sum, sends them there in one all-to-all, decodes what
arrives and sums it in float32. For a whole gradient it also encodes its sum, and all devices gather
the sums. So a number is rounded at most twice, however many devices there are, and no sum
overflows.

A block of numbers shares one scale: its largest magnitude over the largest number of the codec.
int8 is rounded at random, right on average: what is below half a step, 1/254 of the largest of its
block, would be lost in every step if it were rounded to nearest. float8 has smaller numbers where
it needs them, and is rounded to nearest. There is no error feedback: its state would take 4 bytes a
weight on each device, which ZeRO-1 has just saved, and with 8 bits training does not need it
(docs/compression.md).

Where neighbours along the axis share fast links (`within`), they scatter their sum in float32
first, and only sums of neighbours are encoded: a number is rounded once for each group, and each
device sends other groups its share of it.

If a number is not finite, its block's scale is infinite and its block NaN, which the guards see.

n: devices along the axis, in h groups of w neighbours; c: numbers in a row, b: numbers in a block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.schema import CompressionConfig

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
            numbers = jnp.floor(numbers + _draws(numbers))
        numbers = jnp.clip(numbers, -top, top).astype(dtype).reshape(rows_nc.shape)
        return EightBits(jax.lax.bitcast_convert_type(numbers, jnp.uint8), scales_nb)

    def decode(self, encoded: EightBits) -> jax.Array:
        """Returns the float32 rows [n, c] of `encode`."""
        numbers = jax.lax.bitcast_convert_type(encoded.bits_nc, _DTYPES[self.format])
        blocks = numbers.astype(jnp.float32).reshape(*encoded.scales_nb.shape, self.block)
        return (blocks * encoded.scales_nb[..., None]).reshape(encoded.bits_nc.shape)

    def sum(self, x: jax.Array, axis: str, within: int = 1) -> jax.Array:
        """Returns the sum of x over a manual mesh axis, bit for bit the same on all its devices.

        `within`: neighbours along the axis whose sum is not encoded.
        """
        ways = jax.lax.axis_size(axis)
        padded = jnp.pad(x.reshape(-1), (0, -x.size % (ways * self.block)))
        parts_whc = padded.reshape(within, ways // within, -1)
        own = self.encode(_own_sum(parts_whc, axis, self)[None])
        # The device that computed a sum also uses the encoded one, or its weights would diverge.
        whole = self.decode(_gathered(own, axis, within))
        return whole.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)

    def scatter_sum(self, x: jax.Array, axis: str, dim: int, within: int = 1) -> jax.Array:
        """Returns this device's slice, of dim `dim`, of the sum of x over a manual mesh axis.

        `within`: neighbours along the axis whose sum is not encoded.
        """
        ways = jax.lax.axis_size(axis)
        first = jnp.moveaxis(x, dim, 0)
        slices = first.reshape(ways, -1)
        length = slices.shape[1]
        padded = jnp.pad(slices, ((0, 0), (0, -length % self.block)))
        parts_whc = jnp.swapaxes(padded.reshape(ways // within, within, -1), 0, 1)
        summed = _own_sum(parts_whc, axis, self)
        shape = (first.shape[0] // ways, *first.shape[1:])
        return jnp.moveaxis(summed[:length].reshape(shape), 0, dim).astype(x.dtype)


def _draws(numbers: jax.Array) -> jax.Array:
    """Returns a draw in [0, 1) for each number [..., b], float32.

    It is a hash (the 32-bit finaliser `lowbias32`) of the number's bits and of its place in the
    block: no key and no step has to come here, and no step repeats the draws of another, because
    it repeats none of its gradients.
    """
    place_b = jnp.arange(numbers.shape[-1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32) ^ place_b
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    bits = bits ^ (bits >> 16)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def codec_of(settings: CompressionConfig, shape: Sequence[int], ways: int) -> Codec | None:
    """Returns the 8-bit codec of a gradient that is summed over `ways` devices; None: it has none.

    `shape` is that of one layer, or of one of its experts. Vectors are not compressed, because they
    are few bytes, nor are gradients with less than a block for each device. Nothing is compressed
    if all devices are neighbours, which sum in float32.
    """
    size = math.prod(shape)
    if settings.eight_bits is None or settings.within == ways:
        return None
    if len(shape) < 2 or size < ways * settings.block:
        return None
    return Codec(settings.eight_bits, settings.block)


def _own_sum(parts_whc: jax.Array, axis: str, codec: Codec) -> jax.Array:
    """Returns the float32 sum over the axis of one part [c]: of device h w + i, part [i, h].

    Neighbours scatter their sum in float32. The sums then cross to other groups encoded: each
    device sends the others the rows that they sum.
    """
    parts_whc = parts_whc.astype(jnp.float32)
    inside, across = _groups(axis, parts_whc.shape[0])
    if inside:
        parts_whc = jax.lax.psum_scatter(
            parts_whc, axis, scatter_dimension=0, axis_index_groups=inside, tiled=True
        )
    exchange = partial(
        jax.lax.all_to_all,
        axis_name=axis,
        split_axis=0,
        concat_axis=0,
        axis_index_groups=across,
    )
    arrived = EightBits(*map(exchange, codec.encode(parts_whc[0])))
    return codec.decode(arrived).sum(axis=0)


def _gathered(own: EightBits, axis: str, within: int) -> EightBits:
    """Returns the encoded sums of all devices, in the order of `_own_sum`'s parts."""
    inside, across = _groups(axis, within)
    gather = partial(jax.lax.all_gather, axis_name=axis, axis=0, tiled=True)
    # Encoded inside a group too: there it costs no rounding any more.
    for groups in (across, inside) if inside else (across,):
        own = EightBits(*(gather(field, axis_index_groups=groups) for field in own))
    return own


def _groups(axis: str, within: int) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """Returns the groups of `within` neighbours along an axis, and those of devices with the same
    place among their neighbours; (None, None) if no device has neighbours.
    """
    if within == 1:
        return None, None
    index_hw = np.arange(jax.lax.axis_size(axis)).reshape(-1, within)
    return index_hw.tolist(), index_hw.T.tolist()
