"""Sums arrays over a mesh axis by their largest numbers, with error feedback (arXiv:1809.07599).

As in compress.py each device owns a part of the sum: the others send it the largest numbers of
their rows, it adds them up, and all gather the largest numbers of the sums. So the bytes that a
device sends do not grow with the number of devices, as they do where each gathers the numbers of
all others.

Numbers are left out twice, and each time a device keeps them as its error: the sender those that it
does not send, the owner those that its sum loses, in its own row. Together with what was sent the
errors add up to the true sum.

A number is a bfloat16, with its place among `block` consecutive ones in 16 bits: 4 bytes.
The share `keep` of all numbers is sent. One that is not finite counts as larger than any other.

n: devices along the axis, c: numbers in a row, b: numbers in a block, k: those sent.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

# The largest are chosen among this many numbers: more choose better, and take longer to sort.
BLOCK = 4096


@dataclass(frozen=True)
class Largest:
    """A sum of arrays of which only the largest numbers are sent: the share `keep` of all."""

    keep: float

    def sum(self, x: jax.Array, error: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        """Returns (the sum over the manual `axis`, new error), float32.

        Every device along `axis` gets the same sum, to the bit.
        """
        ways = jax.lax.axis_size(axis)
        block = min(BLOCK, -(-x.size // ways))
        total = (x.astype(jnp.float32) + error).reshape(-1)
        rows_ncb = jnp.pad(total, (0, -x.size % (ways * block))).reshape(ways, -1, block)

        sent = self.encode(rows_ncb)
        unsent_ncb = rows_ncb - decode(sent, block)
        arrived = jax.lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
        own_cb = decode(arrived, block).sum(axis=0)
        chosen = self.encode(own_cb)
        unsent_ncb = unsent_ncb.at[jax.lax.axis_index(axis)].add(own_cb - decode(chosen, block))
        # The owner also uses what it sends, or its weights would drift away from the others'.
        sums = decode(jax.lax.all_gather(chosen, axis, axis=0), block)

        def back(rows: jax.Array) -> jax.Array:
            return rows.reshape(-1)[: x.size].reshape(x.shape)

        return back(sums), back(unsent_ncb)

    def encode(self, blocks: jax.Array) -> jax.Array:
        """Returns the largest numbers of blocks [..., b] with their places, uint16 [..., k, 2].

        They are bits, because collectives of bits are the same on every platform.
        """
        count = max(1, round(self.keep * blocks.shape[-1]))
        # A maximum may lose a NaN on CPU; an infinity it keeps.
        sizes = jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), jnp.inf)
        _, places = jax.lax.top_k(sizes, count)
        numbers = jnp.take_along_axis(blocks, places, -1).astype(jnp.bfloat16)
        bits = jax.lax.bitcast_convert_type(numbers, jnp.uint16)
        return jnp.stack([bits, places.astype(jnp.uint16)], -1)


def decode(encoded: jax.Array, block: int) -> jax.Array:
    """Returns the float32 blocks [..., b] of `encode`, with zeros for the numbers not sent."""
    numbers = jax.lax.bitcast_convert_type(encoded[..., 0], jnp.bfloat16).astype(jnp.float32)
    places = encoded[..., 1].astype(jnp.int32)
    zeros = jnp.zeros((*encoded.shape[:-2], block), jnp.float32)
    return jnp.put_along_axis(zeros, places, numbers, -1, inplace=False)
