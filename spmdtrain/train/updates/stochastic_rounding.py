"""Rounds weights to bfloat16 stochastically, without bias."""

import zlib

import jax
import jax.numpy as jnp


def stochastic_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 x rounded to one of the two nearest bfloat16, the nearer one more often, so
    that the mean over keys is x.

    Values that are not finite are unchanged. The draw depends on the index of an element in the
    whole array, so it is the same on every mesh.
    """
    draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (bits + draws) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def key_of(path: str, key: jax.Array) -> jax.Array:
    """Returns the key of one parameter."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()) >> 1)
