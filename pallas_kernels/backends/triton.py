"""Wraps Pallas on Triton: all of it that our kernels use.

jax 0.11 deprecates it "for removal in a future version": when that happens this file and those that
import it go, and nothing else changes. jax's module is imported where it is used, not at import,
for the same reason.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LOG2E = 1.4426950408889634
LEAST_DOT = 16  # elements in each dim of a dot


def call(  # noqa: PLR0913 - the arguments of pallas_call
    kernel: Callable,
    *,
    grid: tuple[int, ...],
    inputs,
    outputs,
    warps: int,
    stages: int,
    interpret: bool,
    name: str,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `kernel(*inputs, *outputs)`, references, per program.

    `inputs` are BlockSpecs (None for an absent input), `outputs` a list of (ShapeDtypeStruct,
    BlockSpec). Inside a kernel every dim of every value is a power of two, and at least LEAST_DOT
    in a dot. `warps` of 32 threads run a program; `stages` is the depth of its software pipeline.
    `aliases`, input to output by number: the output takes the memory of the input.
    """
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=inputs,
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        name=name,
    )


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a [m, k] times b [k, n] in float32; float32 operands are not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def dot_on_tensor_cores(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    """Returns `dot(a, b)`, with float32 as three products in TF32, whose error is about float32's.

    Without tensor cores a large `dot` in float32 needs more registers than there are.
    """
    if interpret or a.dtype != jnp.float32:
        return dot(a, b)
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def load_block(ref, number, size: int, *rest):
    """Returns block `number`, of `size`, of the first dim of `ref`; `rest` indexes others."""
    start = pl.multiple_of(number * size, size)  # tells the compiler that loads are aligned
    return ref[(pl.ds(start, size), *rest)]


def load_masked(ref, mask: jax.Array | None, *, evict: str | None = None) -> jax.Array:
    """Returns the values of `ref` (or ref.at[...]) where `mask`, 0 elsewhere; None: all of them.

    `evict`, "first" or "last": when the L2 cache should drop them.
    """
    from jax.experimental.pallas import triton

    policy = f"evict_{evict}" if evict else None
    other = None if mask is None else 0
    return triton.load(ref, mask=mask, other=other, eviction_policy=policy)


def store_masked(
    ref, value: jax.Array, mask: jax.Array | None, *, evict: str | None = None
) -> None:
    """Writes `value` to `ref` (or ref.at[...]) where `mask`, nothing elsewhere; None: all of it."""
    from jax.experimental.pallas import triton

    policy = f"evict_{evict}" if evict else None
    triton.store(ref, value, mask=mask, eviction_policy=policy)


def next_power_of_two(size: int, least: int = LEAST_DOT) -> int:
    """Returns the smallest power of two that is neither below `size` nor below `least`."""
    return max(1 << (size - 1).bit_length(), least)
