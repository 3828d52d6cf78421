"""Multiplies 8-bit floats, scaled by each array's largest magnitude (arXiv:2209.05433).

Values are e4m3. Gradients are e5m2, which is wider and less precise. The scale maps the largest
magnitude of an array to the largest number of its format, and a product is multiplied by both
scales. The scale comes from the array itself ("current scaling"), so it needs no state. Inside a
manual region it is that of a device's own part, and needs no collective.

A number that is not finite makes the product NaN, which the guards see.

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


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scale of arrays with these largest magnitudes in one of the formats.

    It is 1 where all numbers are 0.
    """
    return jnp.where(largest > 0, largest / float(jnp.finfo(dtype).max), 1.0)


def scaled(x: jax.Array, dtype: Any) -> Scaled:
    """Returns x in one of the two formats."""
    # XLA's maximum on CPU may drop a NaN, but it is still among the numbers.
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return by_scale(x, scale_of(largest, dtype), dtype)


def by_scale(x: jax.Array, scale: jax.Array, dtype: Any) -> Scaled:
    """Returns x in one of the two formats, in units of `scale`; NaN where it is not finite."""
    top = float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    # e4m3 has no infinity: a number rounded beyond `top` would become NaN.
    numbers = jnp.clip(x / scale, -top, top)
    # The difference is 0, or NaN. For a select, a loop over layers would hold and read a constant
    # of the shape of x.
    return Scaled((numbers + (x - x)).astype(dtype), scale)


def dot(a: Scaled, b: Scaled, dims_of_a: Any, dims_of_b: Any, dtype: Any) -> jax.Array:
    """Returns the product of two arrays over these dims, in `dtype`.

    It multiplies 8-bit arrays, so no compiler pass can turn it into a wider matmul.
    """
    dims = ((tuple(dims_of_a), tuple(dims_of_b)), ((), ()))
    # Products of numbers up to 448 overflow in float16, before they are scaled.
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    product = jax.lax.dot_general(a.numbers, b.numbers, dims, preferred_element_type=wide)
    return (product * (a.scale * b.scale).astype(wide)).astype(dtype)


def gradients(
    x8: Scaled, w8: Scaled, dy8: Scaled, contracted: int, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of x and w, in `dtype`, from that of their product over `contracted`
    dims.
    """
    rows = x8.numbers.ndim - contracted
    outs = w8.numbers.ndim - contracted
    dx = dot(dy8, w8, range(rows, rows + outs), range(contracted, contracted + outs), dtype)
    dw = dot(x8, dy8, range(rows), range(rows), dtype)
    return dx, dw


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
    return y, (bits(x8), bits(w8), dtypes)


def _backward(contracted: int, residuals, dy: jax.Array):
    x_bits, w_bits, (like_x, like_w) = residuals
    dy8 = scaled(dy, GRADIENTS)
    dx, dw = gradients(values(x_bits), values(w_bits), dy8, contracted, dy.dtype)
    return dx.astype(like_x.dtype), dw.astype(like_w.dtype)


# Bits are kept: `jax.checkpoint` rounds the arrays that it keeps to their format as IEEE would
# define it, in which the upper numbers of e4m3fn, from 256 to 448, are infinite.


def bits(x: Scaled) -> Scaled:
    """Returns values with their numbers as bits, which a backward pass may keep."""
    return Scaled(jax.lax.bitcast_convert_type(x.numbers, jnp.uint8), x.scale)


def values(x: Scaled) -> Scaled:
    """Inverts `bits`."""
    return Scaled(jax.lax.bitcast_convert_type(x.numbers, VALUES), x.scale)


tensordot.defvjp(_forward, _backward)
