"""The one place that knows Pallas on Triton. jax 0.11 deprecates it "for removal in a future version": when that
happens this file and those that import it go, and nothing else changes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LOG2E = 1.4426950408889634


def call(
    kernel: Callable, *, grid: tuple[int, ...], inputs, outputs, warps: int, stages: int, interpret: bool, name: str
) -> Callable[..., Any]:
    """`kernel` on each program of the grid; `inputs` are BlockSpecs, `outputs` a list of (ShapeDtypeStruct, BlockSpec).

    Values inside are powers of two in every dim; a dot wants 16 at least.
    """
    from jax.experimental.pallas import triton  # not at import: it is the part that will go

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=inputs,
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [m, k] times b [k, n] in float32; float32 inputs are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def rows(ref, tile, block: int, *rest):
    """Block number `tile` of the first dim of `ref`."""
    return ref[(pl.ds(pl.multiple_of(tile * block, block), block), *rest)]


def power_of_two(size: int, least: int = 16) -> int:
    """The smallest power of two that is no smaller than `size` and `least`."""
    return max(1 << (size - 1).bit_length(), least)


def load(ref, mask: jax.Array) -> jax.Array:
    """What `ref` (or ref.at[...]) holds where mask, else 0."""
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=0)


def store(ref, value: jax.Array, mask: jax.Array) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref, value, mask=mask)
