"""Implements the inverse on Triton: a program inverts one matrix, in blocks of 16 x 16.

A block on the diagonal is inverted by doubling: if X inverts the blocks of s x s on its diagonal,
and C is the part of L that joins two of them, X - X C X inverts those of twice the size. Rows of
blocks follow by substitution:

    X[i, j] = -X[i, i] (L[i, j] X[j, j] + ... + L[i, i - 1] X[i - 1, j])

Forward, products are in float32 without tensor cores: a block is small. Backward is -X^T (dX X^T)
below the diagonal, two products of whole matrices.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.triton import call, dot, dot_on_tensor_cores
from pallas_kernels.calls import InverseCall
from pallas_kernels.choose import INTERPRET, no_64_bits, no_gpu

BLOCK = 16
LARGEST = 64  # rows: all blocks of a matrix are in registers


def refusal(call: InverseCall, interpreted: bool) -> str:
    if not BLOCK <= call.size <= LARGEST:
        return f"matrices of {BLOCK} to {LARGEST} rows, not {call.size}"
    if call.matrices * call.size**2 >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return no_64_bits() or no_gpu(interpreted)


def unit_inverse(lower: jax.Array, name: str) -> jax.Array:
    """Does what `xla.unit_inverse` does."""
    matrices = lower.reshape(-1, *lower.shape[-2:])
    return _inverse_compiled(name, matrices).reshape(lower.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _inverse(name: str, lower_mij: jax.Array) -> jax.Array:
    return _forward(name, lower_mij)[0]


def _forward(name: str, lower_mij: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _run(name, _forward_kernel, 2, "unit_inverse_forward", lower_mij)
    return inverse, inverse


@partial(jax.jit, static_argnums=(0,), inline=True)  # jax 0.10 calls it outside any jit
def _backward(name: str, inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    kernel = partial(_backward_kernel, name.endswith(INTERPRET))
    return (_run(name, kernel, 4, "unit_inverse_backward", inverse, gradient),)


_inverse.defvjp(_forward, _backward)
# Compiled once, also outside any jit.
_inverse_compiled = jax.jit(_inverse, static_argnums=(0,), inline=True)


def _run(name: str, kernel, warps: int, kernel_name: str, *matrices: jax.Array) -> jax.Array:
    """Returns what the kernel makes of each matrix."""
    count, size, _ = matrices[0].shape
    own = pl.BlockSpec((None, size, size), lambda m: (m, 0, 0))
    run = call(
        kernel,
        grid=(count,),
        inputs=[own] * len(matrices),
        outputs=[(jax.ShapeDtypeStruct((count, size, size), jnp.float32), own)],
        warps=warps,
        stages=1,
        interpret=name.endswith(INTERPRET),
        name=kernel_name,
    )
    return run(*matrices)[0]


def _forward_kernel(lower_ref, inverse_ref):
    count = lower_ref.shape[0] // BLOCK

    def at(i: int, j: int):
        return pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)

    diagonal = [_inverse_of_block(lower_ref[at(i, i)]) for i in range(count)]
    for j in range(count):
        column = {j: diagonal[j]}
        for i in range(j + 1, count):
            total = dot(lower_ref[at(i, j)], diagonal[j])
            for k in range(j + 1, i):
                total += dot(lower_ref[at(i, k)], column[k])
            column[i] = -dot(diagonal[i], total)
        for i in range(count):
            inverse_ref[at(i, j)] = column.get(i, jnp.zeros((BLOCK, BLOCK), jnp.float32))


def _inverse_of_block(lower: jax.Array) -> jax.Array:
    rows, columns = jnp.arange(BLOCK)[:, None], jnp.arange(BLOCK)[None]
    inverse = jnp.where(rows == columns, 1.0, 0.0)
    width = 1
    while width < BLOCK:
        # Halves of a block of 2 x width: the later half's rows, the earlier half's columns.
        joins = (rows & width != 0) & ((rows ^ columns) & -width == width)
        join = jnp.where(joins, lower, 0.0)
        if width > 1:
            join = dot(inverse, dot(join, inverse))
        inverse -= join
        width *= 2
    return inverse


def _backward_kernel(interpret: bool, inverse_ref, gradient_ref, out_ref):
    dot = partial(dot_on_tensor_cores, interpret=interpret)
    transposed = inverse_ref[...].T
    product = dot(transposed, dot(gradient_ref[...], transposed))
    places = jnp.arange(out_ref.shape[0])
    out_ref[...] = jnp.where(places[:, None] > places[None], -product, 0.0)
