"""Makes random numbers and permutations as pure functions of a counter.

Nothing is stored, and any element can be computed directly. It is all integer arithmetic, so every
numpy version and every process gets the same bits. All functions are vectorised.

`grain.experimental.index_shuffle` offers this permutation too, but for one index per call, below
2**31, in an experimental module whose import takes a second and pulls in jax.
"""

import numpy as np

ROUNDS = 4  # each mixes both halves once


def scramble(value) -> np.ndarray:
    """Maps uint64 to noise-like uint64, one to one.

    It is the finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    """
    value = np.atleast_1d(np.asarray(value, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def random_bits(seed: int, stream: int, counter) -> np.ndarray:
    """Returns 64 random bits, uint64, for each counter (an int or an array).

    Different `stream`s of one seed are independent.
    """
    key = scramble(scramble(seed % 2**64) ^ np.uint64(stream))
    return scramble(key ^ scramble(counter))


def permute(index, count: int, key) -> np.ndarray:
    """Returns where each index in [0, count) goes in a permutation, int64.

    `key` selects the permutation: one key for all indices, or one for each.

    It is a Feistel network on the pairs (left, right) of a grid barely larger than count. An index
    that lands outside count goes through it again until it is inside. Both steps are one to one, so
    their composition is.
    """
    index = np.atleast_1d(np.asarray(index, np.uint64))
    index, key = np.broadcast_arrays(index, np.asarray(key, np.uint64))
    width = int(np.ceil(np.sqrt(count)))
    height = -(-count // width)
    keys = [scramble(key ^ scramble(turn)) for turn in range(2 * ROUNDS)]
    result = _feistel(index, width, height, keys)
    while True:
        outside = result >= np.uint64(count)
        if not outside.any():
            return result.astype(np.int64)
        result[outside] = _feistel(result[outside], width, height, [key[outside] for key in keys])


def _feistel(index, width: int, height: int, keys) -> np.ndarray:
    lefts = np.uint64(width)
    rights = np.uint64(height)
    left = index // rights
    right = index % rights
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + scramble(right ^ even) % lefts) % lefts
        right = (right + scramble(left ^ odd) % rights) % rights
    return left * rights + right
