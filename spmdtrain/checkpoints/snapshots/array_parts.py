"""Copies the parts of arrays that a process holds into memory, and back.

A part is the piece of an array that one device holds. If several devices of the process hold
copies, they are one part. The place of each part follows from the shardings alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

ALIGNED = 64  # bytes, so that any dtype may be read in place
Bounds = tuple[tuple[int, int], ...]  # (start, stop) of a part along each dim
Parts = dict[str, dict[Bounds, int]]  # for each array, where each of its parts begins, in bytes
Arrays = Mapping[str, jax.Array]
Described = Mapping[str, jax.Array | jax.ShapeDtypeStruct]


def parts_of(arrays: Described) -> tuple[Parts, int]:
    """Returns the parts of arrays that this process holds, and the bytes of all of them."""
    parts: Parts = {}
    end = 0
    for name, x in arrays.items():
        assert x.sharding is not None  # a state is always sharded
        parts[name] = {}
        for index in x.sharding.addressable_devices_indices_map(x.shape).values():
            bounds = _bounds(index or (), x.shape)
            if bounds not in parts[name]:
                parts[name][bounds] = end
                size = math.prod(stop - start for start, stop in bounds) * x.dtype.itemsize
                end += -(-size // ALIGNED) * ALIGNED
    return parts, end


def as_document(parts: Parts) -> dict[str, list]:
    """Returns the parts as JSON stores them: for each array a list of [bounds, begin]."""
    return {
        name: [[[list(of_dim) for of_dim in bounds], begin] for bounds, begin in of_array.items()]
        for name, of_array in parts.items()
    }


def write(arrays: Arrays, parts: Parts, memory: memoryview) -> None:
    """Copies the parts of arrays into memory. Waits for the devices."""
    for x in arrays.values():
        for shard in x.addressable_shards:
            if shard.device.platform != "cpu":  # whose arrays are read in place
                shard.data.copy_to_host_async()
    whole = np.frombuffer(memory, np.uint8)
    for name, x in arrays.items():
        rest = dict(parts[name])
        for shard in x.addressable_shards:
            begin = rest.pop(_bounds(shard.index, x.shape), None)
            if begin is not None:
                part = np.asarray(shard.data)
                np.copyto(_view(whole, begin, part.shape, part.dtype), part)


def read(abstract: Mapping[str, jax.ShapeDtypeStruct], parts: Parts, memory: memoryview) -> Arrays:
    """Returns arrays in their shardings, copied from memory."""
    whole = np.frombuffer(memory, np.uint8)

    def array(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            bounds = _bounds(index, x.shape)
            shape = [stop - start for start, stop in bounds]
            # A CPU device would keep reading this memory, which the next snapshot overwrites.
            return _view(whole, parts[name][bounds], shape, x.dtype).copy()

        return jax.make_array_from_callback(x.shape, x.sharding, part)

    return {name: array(name, x) for name, x in abstract.items()}


def _view(whole: np.ndarray, begin: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    return whole[begin : begin + size].view(dtype).reshape(shape)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
