"""Fingerprints of arrays: by them a checkpoint proves that it is read as it was written.

The fingerprint of an array is two sums over its elements, modulo 2^32, of `mixed(bits, index)`:
the bits of the element, mixed with its index in the whole array, row by row.

- A sum takes its terms in any order, so every sharding and every number of processes gives the
  same fingerprint, and each device reads just what it holds.
- For a given index `mixed` is a bijection of the bits. So one element that changes, by a bit or by
  many, changes both sums: always.
- Where several elements change, a sum misses it with a chance of 2^-32, as for random terms. The
  two sums are mixed differently: both miss it with a chance of 2^-64.

The steps of the mixing are those of the finaliser of MurmurHash3 (Appleby, public domain), after
the index was spread over the word by an odd factor.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Fingerprint = tuple[int, int]

# For each of the two sums: the factor of the index, and the two factors of the mixing. All odd,
# and so bijections modulo 2^32.
FACTORS = (
    (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35),
    (0x7FEB352D, 0x2C1B3C6D, 0x297A2D39),
)
CHUNK = 1 << 22  # elements that numpy mixes at once


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, Fingerprint]:
    """The fingerprint of each array, by its name.

    Computed where the arrays are, in one program. All processes that hold parts of them must call
    this, and all get the same. Waits for the devices.
    """
    if not arrays:
        return {}
    sharding = next(iter(arrays.values())).sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    sums = np.asarray(_program(mesh)(dict(arrays)))
    # jit sorts the names of a dict
    return {name: (int(a), int(b)) for name, (a, b) in zip(sorted(arrays), sums, strict=True)}


def fingerprint(x: np.ndarray) -> Fingerprint:
    """The same of an array of numpy."""
    words = np.ascontiguousarray(x).reshape(-1)
    words = words.view(np.uint32 if words.itemsize == 8 else f"uint{8 * words.itemsize}")
    totals = [0, 0]
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK].astype(np.uint32)
        index = np.arange(start, start + chunk.size, dtype=np.uint64).astype(np.uint32)
        for number, factors in enumerate(FACTORS):
            mixed = _mixed(chunk, index, *(np.uint32(factor) for factor in factors))
            totals[number] += int(mixed.sum(dtype=np.uint64))
    first, second = (total % 2**32 for total in totals)
    return first, second


@functools.cache
def _program(mesh: Mesh | None):
    """`arrays -> uint32 [arrays, 2]`, jitted; the result is whole on every device of `mesh`."""

    def sums(arrays: dict[str, jax.Array]) -> jax.Array:
        return jnp.stack([_sums(arrays[name]) for name in sorted(arrays)])

    everywhere = None if mesh is None else NamedSharding(mesh, P())
    return jax.jit(sums, out_shardings=everywhere)


def _sums(x: jax.Array) -> jax.Array:
    """The two sums of one array, uint32 [2]."""
    words = _words(x)
    index = jnp.uint32(0)
    stride = 1
    for dim in reversed(range(words.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        index += along * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    mixed = [_mixed(words, index, *map(jnp.uint32, factors)) for factors in FACTORS]
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in mixed])


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32; one of 64 bits is two elements."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.astype(jnp.uint32)


def _mixed(word: Any, index: Any, spread: Any, first: Any, second: Any) -> Any:
    """Mix words with their indices, modulo 2^32; a bijection of the word."""
    word = word ^ (index * spread)
    word = (word ^ (word >> np.uint32(16))) * first
    word = (word ^ (word >> np.uint32(13))) * second
    return word ^ (word >> np.uint32(16))
