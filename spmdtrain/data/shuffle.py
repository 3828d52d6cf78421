"""Random numbers and permutations as pure functions of a counter: nothing is stored, any element is had at once.

Integer arithmetic only, so every numpy version and every process gives the same bits. All functions are vectorised.
A library does the permutation too (`grain.experimental.index_shuffle`), but one index per call, below 2**31, from a
module called experimental, and its import costs a second and brings jax along; hence these few lines.
"""

import numpy as np

ROUNDS = 4  # each mixes both halves once


def scramble(value) -> np.ndarray:
    """A bijection of uint64 that looks like noise: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = np.atleast_1d(np.asarray(value, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def random_bits(seed: int, stream: int, counter) -> np.ndarray:
    """64 random bits per counter (an int or an array). Different `stream`s of one seed are unrelated."""
    key = scramble(scramble(seed % 2**64) ^ np.uint64(stream))
    return scramble(key ^ scramble(counter))


def permute(index, count: int, key) -> np.ndarray:
    """Where each index in [0, count) goes in the permutation named by `key` (one, or one per index), as int64.

    A Feistel network on the pairs (left, right) of a grid that is hardly larger than count; an index that lands
    outside count walks on until it is inside. Both steps are bijections, so the whole is one.
    """
    index, key = np.broadcast_arrays(np.atleast_1d(np.asarray(index, np.uint64)), np.asarray(key, np.uint64))
    width = int(np.ceil(np.sqrt(count)))
    height = -(-count // width)
    keys = [scramble(key ^ scramble(turn)) for turn in range(2 * ROUNDS)]
    result = _feistel(index, width, height, keys)
    while (outside := result >= np.uint64(count)).any():
        result[outside] = _feistel(result[outside], width, height, [key[outside] for key in keys])
    return result.astype(np.int64)


def _feistel(index, width: int, height: int, keys) -> np.ndarray:
    width, height = np.uint64(width), np.uint64(height)
    left, right = index // height, index % height
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + scramble(right ^ even) % width) % width
        right = (right + scramble(left ^ odd) % height) % height
    return left * height + right
