"""Multiplies 8-bit floats with a scale for each block of 32 numbers (MXFP8, OCP MX v1.0).

Blocks are of 32 numbers along the contracted dim; values and gradients are e4m3. A scale is the
least power of two with which the largest magnitude of its block does not exceed 448, the largest
e4m3 (arXiv:2506.08027, appendix A). Since a block belongs to one dim, an array is rounded from its
wide form for each dim along which it is contracted: x along i forward and along its tokens for the
gradient of w.

NVIDIA's GPUs multiply blocks from Blackwell on, through cuDNN. Elsewhere the same rounded numbers
are multiplied in float32.

If a number is not finite, its block becomes NaN, and so do its products, which the guards see.

m, n: rows of two matrices, k: their contracted dim.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import gpus
from pallas_kernels.partition import wholly_manual
from spmdtrain.config.errors import ConfigError

BLOCK = 32
VALUES = jnp.float8_e4m3fn
SCALES = jnp.float8_e8m0fnu

# Bits of float32: the sign, and infinity; larger magnitudes are NaN.
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_NAN_SCALE = 0xFF


def check_mxfp8(device_kind: str) -> None:
    """Refuses a device that does not multiply blocks; a CPU does so in float32."""
    if device_kind != "cpu" and gpus.generation(device_kind) != "blackwell":
        raise ConfigError(
            f"precision.matmul='mxfp8': {device_kind} multiplies no blocks of 8-bit floats",
            found="only B200, B300 and their like do",
            fix="--set precision.matmul=float8",
        )


class Blocks(NamedTuple):
    """A matrix whose rows are blocks of 8-bit floats. Both parts are stored as uint8.

    Bits are stored because `jax.checkpoint` rounds the floats that it keeps (float8.py).
    """

    numbers: jax.Array  # [m, k], e4m3
    scales: jax.Array  # [m, k / 32], e8m0


def in_blocks(x: jax.Array) -> Blocks:
    """Returns a matrix [m, k] in blocks along k, a multiple of 32."""
    rows, width = x.shape
    blocks = x.astype(jnp.float32).reshape(rows, width // BLOCK, BLOCK)
    # Read as integers, magnitudes keep their order, and a maximum loses no NaN.
    bits = jax.lax.bitcast_convert_type(blocks, jnp.int32) & _MAGNITUDE
    largest = jnp.max(bits, -1)
    # 448 is 1.75 * 2^8: the exponent rises by one if the mantissa exceeds that of 1.75.
    # The smallest scale is 2^-126, whose inverse is no subnormal number.
    code = jnp.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    inverse = jnp.where(largest < _INFINITY, (254 - code) << 23, _NAN)
    code = jnp.where(largest < _INFINITY, code, _NAN_SCALE)
    numbers = blocks * jax.lax.bitcast_convert_type(inverse, jnp.float32)[..., None]
    numbers = jax.lax.bitcast_convert_type(numbers.astype(VALUES), jnp.uint8)
    return Blocks(numbers.reshape(rows, width), code.astype(jnp.uint8))


def product(a: Blocks, b: Blocks, dtype) -> jax.Array:
    """Returns the product [m, n] of a [m, k] and b [n, k], in `dtype`."""
    ways = {"cuda": _by_hardware, "default": _in_float32}
    made = {platform: partial(multiply, dtype=dtype) for platform, multiply in ways.items()}
    return jax.lax.platform_dependent(*a, *b, **made)


def _by_hardware(a_numbers, a_scales, b_numbers, b_scales, *, dtype) -> jax.Array:
    def multiply(a_numbers, b_numbers, a_scales, b_scales):
        def batched(x: jax.Array, kind) -> jax.Array:
            return jax.lax.bitcast_convert_type(x, kind)[None]

        return jax.nn.scaled_matmul(
            batched(a_numbers, VALUES),
            batched(b_numbers, VALUES),
            batched(a_scales, SCALES),
            batched(b_scales, SCALES),
            preferred_element_type=dtype,
        )[0]

    return wholly_manual(multiply)(a_numbers, b_numbers, a_scales, b_scales)


def _in_float32(a_numbers, a_scales, b_numbers, b_scales, *, dtype) -> jax.Array:
    a, b = wide(Blocks(a_numbers, a_scales)), wide(Blocks(b_numbers, b_scales))
    return jax.lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    ).astype(dtype)


def wide(x: Blocks) -> jax.Array:
    """Returns the float32 numbers [m, k] that the blocks stand for."""
    # Without a barrier XLA may take the two conversions for one that changes nothing.
    bits, codes = jax.lax.optimization_barrier(x)
    numbers = jax.lax.bitcast_convert_type(bits, VALUES).astype(jnp.float32)
    scales = jax.lax.bitcast_convert_type(codes.astype(jnp.int32) << 23, jnp.float32)
    return (numbers.reshape(*scales.shape, BLOCK) * scales[..., None]).reshape(numbers.shape)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns `x @ w` [..., n] for x [..., k] and w [k, n], in the dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    return product(in_blocks(rows), in_blocks(w.T), x.dtype).reshape(*x.shape[:-1], w.shape[1])


def weight_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns the gradient [i, o] of `x @ w` for x [..., i] and dy [..., o], in the dtype of dy."""
    x, dy = (array.reshape(-1, array.shape[-1]) for array in (x, dy))
    return product(in_blocks(x.T), in_blocks(dy.T), dy.dtype)


def tensordot(x: jax.Array, w: jax.Array, contracted: int) -> jax.Array:
    """Returns `jnp.tensordot(x, w, contracted)` in the dtype of x, multiplied in blocks.

    So are both gradients, for which the tokens of x (the product of its other dims) must be a
    multiple of 32 too. The backward pass keeps x and w in blocks.
    """
    rows, columns = x.shape[: x.ndim - contracted], w.shape[contracted:]
    inner = math.prod(w.shape[:contracted])
    y = _multiply(x.reshape(-1, inner), w.reshape(inner, -1).astype(x.dtype))
    return y.reshape(*rows, *columns)


@jax.custom_vjp
def _multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(x, w)


def _forward(x: jax.Array, w: jax.Array):
    return matmul(x, w), (in_blocks(x.T), in_blocks(w))


def _backward(residuals, dy: jax.Array):
    x, w = residuals
    dx = product(in_blocks(dy), w, dy.dtype)
    return dx, product(x, in_blocks(dy.T), dy.dtype)


_multiply.defvjp(_forward, _backward)
