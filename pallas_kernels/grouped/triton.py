"""Implements the grouped matmul on Triton.

A tile of rows has one expert, so the kernels need neither masks nor a search for borders. In the
forward pass, and for the gradient of x, a program computes one block of the result, and reads which
expert's weight it needs. For the gradient of the weights, a program owns a block of one expert's
gradient, and walks over the tiles of that expert. So there are no atomics, and every sum has a
fixed order.

Letters as in xla.py. A tile is cut into blocks of rows, a power of two.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.triton import LEAST_DOT, call, dot, load_block
from pallas_kernels.calls import GroupedCall
from pallas_kernels.choose import INTERPRET, VARIANT, no_64_bits, no_gpu
from pallas_kernels.grouped.tiles import order_by_expert


class Blocks(NamedTuple):
    """The largest blocks: rows, contracted columns and result columns at a time."""

    rows: int
    contracted: int
    columns: int


# By the bytes of an element. float32 runs without tensor cores.
MULTIPLY = {2: Blocks(128, 64, 128), 4: Blocks(64, 32, 64)}
# What is contracted here are rows; "rows" of the result are x's columns.
WEIGHTS = {2: Blocks(128, 64, 128), 4: Blocks(64, 32, 64)}
# Result columns of other tilings, which are tried when kernels are measured: "triton/narrow".
VARIANTS = {"narrow": 64}
DTYPES = ("bfloat16", "float16", "float32")


def refusal(call: GroupedCall, interpreted: bool) -> str:
    rows, k, n = call.rows, call.width, call.out_width
    if call.dtype not in DTYPES:
        return f"16-bit floats or float32, not {call.dtype}"
    if call.tile % LEAST_DOT:
        return f"tiles of a multiple of {LEAST_DOT} rows, not {call.tile}"
    if k % LEAST_DOT or n % LEAST_DOT:
        return f"widths that are multiples of {LEAST_DOT}, not {k} and {n}"
    if max(rows * k, rows * n, call.experts * k * n) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return no_64_bits() or no_gpu(interpreted)


def multiply(x_rk, w_xkn, expert_t, transposed: bool, name: str):
    """Does what `xla.multiply` does."""
    rows, k = x_rk.shape
    n = w_xkn.shape[1 if transposed else 2]
    largest = _largest_blocks(MULTIPLY, x_rk.dtype, name)
    tile = rows // expert_t.shape[0]
    block = Blocks(_cut(tile, largest.rows), _cut(k, largest.contracted), _cut(n, largest.columns))
    # The expert of each block of rows.
    expert_b = jnp.repeat(expert_t, tile // block.rows, total_repeat_length=rows // block.rows)
    run = call(
        partial(_multiply_kernel, transposed, block),
        grid=(rows // block.rows, n // block.columns),
        inputs=[_whole(expert_b), _whole(x_rk), _whole(w_xkn)],
        outputs=[
            (
                jax.ShapeDtypeStruct((rows, n), x_rk.dtype),
                pl.BlockSpec((block.rows, block.columns), lambda i, j: (i, j)),
            )
        ],
        warps=8 if block.rows * block.columns > 64 * 64 else 4,
        stages=3 if x_rk.dtype.itemsize == 2 else 2,
        interpret=name.endswith(INTERPRET),
        name="grouped_matmul",
    )
    return run(expert_b, x_rk, w_xkn)[0]


def _multiply_kernel(transposed, block, expert_ref, x_ref, w_ref, y_ref):
    """Computes a block of y; if its rows have no expert it reads nothing else."""
    number = pl.program_id(0)
    rows = pl.ds(pl.multiple_of(number * block.rows, block.rows), block.rows)
    columns = pl.ds(pl.multiple_of(pl.program_id(1) * block.columns, block.columns), block.columns)
    expert = expert_ref[number]
    zero = jnp.zeros((block.rows, block.columns), jnp.float32)

    @pl.when(expert < 0)
    def _():
        y_ref[...] = zero.astype(y_ref.dtype)

    def turn(i, y):
        contracted = pl.ds(pl.multiple_of(i * block.contracted, block.contracted), block.contracted)
        if transposed:
            w = w_ref[expert, columns, contracted].T
        else:
            w = w_ref[expert, contracted, columns]
        return y + dot(x_ref[rows, contracted], w)

    @pl.when(expert >= 0)
    def _():
        turns = x_ref.shape[1] // block.contracted
        y_ref[...] = jax.lax.fori_loop(0, turns, turn, zero).astype(y_ref.dtype)


def weights_gradient(x_rk, dy_rn, expert_t, experts: int, name: str):
    """Does what `xla.weights_gradient` does."""
    rows, k = x_rk.shape
    n = dy_rn.shape[1]
    tile = rows // expert_t.shape[0]
    largest = _largest_blocks(WEIGHTS, x_rk.dtype, name)
    block = Blocks(_cut(k, largest.rows), _cut(tile, largest.contracted), _cut(n, largest.columns))
    tile_t = order_by_expert(expert_t, experts)
    count_x = (expert_t == jnp.arange(experts)[:, None]).sum(1).astype(jnp.int32)
    first_x = (jnp.cumsum(count_x) - count_x).astype(jnp.int32)
    run = call(
        partial(_weights_kernel, tile // block.contracted, block),
        grid=(k // block.rows, n // block.columns, experts),
        inputs=[_whole(tile_t), _whole(first_x), _whole(count_x), _whole(x_rk), _whole(dy_rn)],
        outputs=[
            (
                jax.ShapeDtypeStruct((experts, k, n), x_rk.dtype),
                pl.BlockSpec((None, block.rows, block.columns), lambda i, j, e: (e, i, j)),
            )
        ],
        warps=8 if block.rows * block.columns > 64 * 64 else 4,
        stages=2,
        interpret=name.endswith(INTERPRET),
        name="grouped_matmul_weights",
    )
    return run(tile_t, first_x, count_x, x_rk, dy_rn)[0]


def _weights_kernel(cuts, block, tile_ref, first_ref, count_ref, x_ref, dy_ref, dw_ref):
    """Computes a block of one expert's dw, over the `cuts` blocks of rows of each of its tiles."""
    x_columns = pl.ds(pl.multiple_of(pl.program_id(0) * block.rows, block.rows), block.rows)
    dy_columns = pl.ds(
        pl.multiple_of(pl.program_id(1) * block.columns, block.columns), block.columns
    )
    expert = pl.program_id(2)
    first = first_ref[expert]

    def turn(i, dw):
        # lax's: Triton's dialect has no // of signed numbers.
        tile = tile_ref[first + jax.lax.div(i, cuts)]
        cut = tile * cuts + jax.lax.rem(i, cuts)
        x = load_block(x_ref, cut, block.contracted, x_columns)
        dy = load_block(dy_ref, cut, block.contracted, dy_columns)
        return dw + dot(x.T, dy)

    zero = jnp.zeros((block.rows, block.columns), jnp.float32)
    dw = jax.lax.fori_loop(0, count_ref[expert] * cuts, turn, zero)
    dw_ref[...] = dw.astype(dw_ref.dtype)


def _largest_blocks(table: dict[int, Blocks], dtype, name: str) -> Blocks:
    largest = table[dtype.itemsize]
    variant = name.removesuffix(INTERPRET).partition(VARIANT)[2]
    return largest._replace(columns=min(VARIANTS.get(variant, largest.columns), largest.columns))


def _cut(size: int, limit: int) -> int:
    """Returns the largest power of two that divides `size`, up to `limit`, a power of two."""
    return min(size & -size, limit)


def _whole(x) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
