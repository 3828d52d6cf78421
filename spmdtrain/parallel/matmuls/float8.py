"""Multiplies 8-bit floats, scaled by each array's largest magnitude (arXiv:2209.05433).

Values are e4m3. Gradients are e5m2, which is wider and less precise. The scale maps the largest
magnitude of an array to the largest number of its format, and a product is multiplied by both
scales. The scale comes from the array itself ("current scaling"), so it needs no state. Inside a
manual region it is that of a device's own part, and needs no collective.

If a number is not finite, the scale is infinite and the product NaN, which the guards see.

x: values [..., i], w: a weight [i, o], y: their product [..., o].
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import gpus
from spmdtrain.config.errors import ConfigError

VALUES = jnp.float8_e4m3fn
GRADIENTS = jnp.float8_e5m2


def check_float8(device_kind: str) -> None:
    """Refuses a GPU that has no matmul of 8-bit floats: they came with Ada and Hopper."""
    if gpus.generation(device_kind) in (gpus.BEFORE_AMPERE, "ampere"):
        raise ConfigError(
            f"precision.matmul='float8': {device_kind} multiplies no 8-bit floats",
            fix="--set precision.matmul=compute",
        )


class Scaled(NamedTuple):
    """An array stored as 8-bit floats."""

    numbers: jax.Array
    scale: jax.Array  # float32; the array is numbers * scale


def scaled(x: jax.Array, dtype: Any) -> Scaled:
    """Returns x in one of the two formats."""
    top = float(jnp.finfo(dtype).max)
    # XLA's maximum on CPU may lose a NaN, but not an infinity.
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest / top, 1.0)
    # e4m3 has no infinity: a number rounded beyond `top` would become NaN.
    return Scaled(jnp.clip(x.astype(jnp.float32) / scale, -top, top).astype(dtype), scale)


def dot(a: Scaled, b: Scaled, dims_of_a: Any, dims_of_b: Any, dtype: Any) -> jax.Array:
    """Returns the product of two arrays over these dims, in `dtype`.

    It multiplies 8-bit arrays, so no compiler pass can turn it into a wider matmul.
    """
    dims = ((tuple(dims_of_a), tuple(dims_of_b)), ((), ()))
    product = jax.lax.dot_general(a.numbers, b.numbers, dims, preferred_element_type=dtype)
    return product * (a.scale * b.scale).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def tensordot(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
    """Returns `jnp.tensordot(x, w, contracted)` in the dtype of x, multiplied in 8 bits.

    So are both gradients. The backward pass keeps x and w in 8 bits.
    """
    y, _ = _forward(x, w, contracted)
    return y


def _forward(x: jax.Array, w: jax.Array, contracted: int):
    dtypes = jnp.zeros((), x.dtype), jnp.zeros((), w.dtype)
    x8, w8 = scaled(x, VALUES), scaled(w, VALUES)
    y = dot(x8, w8, range(x.ndim - contracted, x.ndim), range(contracted), x.dtype)
    return y, (_bits(x8), _bits(w8), dtypes)


def _backward(contracted: int, kept, dy: jax.Array):
    x_bits, w_bits, (like_x, like_w) = kept
    x8, w8 = _values(x_bits), _values(w_bits)
    rows = x8.numbers.ndim - contracted
    outs = w8.numbers.ndim - contracted
    dy8 = scaled(dy, GRADIENTS)
    dx = dot(dy8, w8, range(rows, rows + outs), range(contracted, contracted + outs), dy.dtype)
    dw = dot(x8, dy8, range(rows), range(rows), dy.dtype)
    return dx.astype(like_x.dtype), dw.astype(like_w.dtype)


# Bits are kept: `jax.checkpoint` rounds the arrays that it keeps to their format as IEEE would
# define it, in which the upper numbers of e4m3fn, from 256 to 448, are infinite.


def _bits(x: Scaled) -> Scaled:
    return Scaled(jax.lax.bitcast_convert_type(x.numbers, jnp.uint8), x.scale)


def _values(x: Scaled) -> Scaled:
    return Scaled(jax.lax.bitcast_convert_type(x.numbers, VALUES), x.scale)


tensordot.defvjp(_forward, _backward)
