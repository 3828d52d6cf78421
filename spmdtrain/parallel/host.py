"""Memory of the host that devices read and write directly: where arrays may rest between steps."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

KIND = "pinned_host"  # jax's name for it
ALIGNMENT = 64  # bytes: XLA for CPU uses a numpy array in place if it is aligned to this


def rests_on_host(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns True for an array, concrete or abstract, that rests on the host."""
    return x.sharding is not None and x.sharding.memory_kind == KIND


def on_device(x: jax.Array) -> jax.Array:
    """Returns the traced x in the memory of the device, if it is in that of the host."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def on_host(x: jax.Array) -> jax.Array:
    """Returns the traced x in the memory of the host."""
    return jax.device_put(x, jax.memory.Space.Host)


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an uninitialised array that a CPU device can use without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    bytes_around = np.empty(size + ALIGNMENT, np.uint8)
    first = -bytes_around.ctypes.data % ALIGNMENT
    return bytes_around[first : first + size].view(dtype).reshape(shape)
