"""Rounds weights to bfloat16 such that they are right on average."""

import zlib

import jax
import jax.numpy as jnp


def stochastic_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 x as one of the two nearest bfloat16, the nearer one with more chance.

    The mean over keys is x. What is not finite stays. The draw belongs to the place of an element
    in the whole array, so that no mesh changes it.
    """
    draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (bits + draws) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def key_of(path: str, key: jax.Array) -> jax.Array:
    """Returns the key of one parameter."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()) >> 1)
