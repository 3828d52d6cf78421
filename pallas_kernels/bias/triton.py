"""Implements the backward passes on Triton; the forward pass is cuBLAS's.

A program owns some columns, and walks over a share of the rows. It keeps the sums of its columns in
registers and writes them once; XLA adds the sums of all programs. So there are no atomics, and
every sum has a fixed order.
"""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends.triton import call, load_masked, store_masked
from pallas_kernels.choose import INTERPRET, device_kind, no_64_bits, no_gpu
from pallas_kernels.gpus import find

ROWS = 16  # of a block of heads
GELU_BLOCK = (16, 256)  # rows, columns
WARPS = 8
PROGRAMS_OF_A_CORE = 4
CORES = 132  # of a GPU that is not listed: an H100's
GELU_FACTOR = 0.7978845608028654  # sqrt(2 / pi)
GELU_CUBIC = 0.044715

# In this form alone XLA takes the epilogue of cuBLAS's matmul for it, which computes in float32.
gelu = jax.nn.gelu


def refusal(shape: tuple[int, ...], interpreted: bool) -> str:
    """Says why the kernels cannot run on an array of this shape; "" if they can."""
    width = shape[-1]
    if len(shape) == 5 and width & (width - 1):
        return f"a head dim that is a power of two, not {width}"
    if prod(shape) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return no_64_bits() or no_gpu(interpreted)


def joined(dq_btkgd, dk_btkd, dv_btkd, name: str) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.joined` does."""
    b, t, k, g, d = dq_btkgd.shape
    rows, slots = b * t, k * (g + 2)
    programs, turns = _shares(rows, ROWS, k)
    arrays = dq_btkgd.reshape(rows, k * g, d), *(x.reshape(rows, k, d) for x in (dk_btkd, dv_btkd))
    shapes = (rows, slots, d), (programs, slots, d)
    run = call(
        partial(_joined_kernel, g, turns),
        grid=(programs, k),
        inputs=[_whole(x.shape) for x in arrays],
        outputs=[
            (jax.ShapeDtypeStruct(shapes[0], dq_btkgd.dtype), _whole(shapes[0])),
            (jax.ShapeDtypeStruct(shapes[1], jnp.float32), _whole(shapes[1])),
        ],
        warps=WARPS,
        stages=1,
        interpret=name.endswith(INTERPRET),
        name="joined_heads",
    )
    gradient, sums = run(*arrays)
    return gradient.reshape(b, t, k, g + 2, d), sums.sum(0).reshape(k, g + 2, d)


def _joined_kernel(group: int, turns: int, dq_ref, dk_ref, dv_ref, out_ref, sums_ref):
    rows, _, d = out_ref.shape
    program, head = pl.program_id(0), pl.program_id(1)
    sources = [(dq_ref, head * group + slot) for slot in range(group)]
    sources += [(dk_ref, head), (dv_ref, head)]
    first_slot = head * len(sources)

    def turn(i, sums):
        start = (program * turns + i) * ROWS
        at = pl.ds(start, ROWS)
        mask = jnp.broadcast_to((start + jnp.arange(ROWS) < rows)[:, None], (ROWS, d))
        gradients = [load_masked(ref.at[at, slot], mask) for ref, slot in sources]
        for number, gradient in enumerate(gradients):
            store_masked(out_ref.at[at, first_slot + number], gradient, mask)
        pairs = zip(sums, gradients, strict=True)
        return tuple(total + gradient.astype(jnp.float32) for total, gradient in pairs)

    # Sums stay apart by row of the block until the end: threads then need not meet in each turn.
    zeros = (jnp.zeros((ROWS, d), jnp.float32),) * len(sources)
    for number, total in enumerate(jax.lax.fori_loop(0, turns, turn, zeros)):
        sums_ref[program, first_slot + number] = total.sum(0)


def gelu_gradient(biased: jax.Array, dy: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.gelu_gradient` does."""
    f = biased.shape[-1]
    shape = (prod(biased.shape[:-1]), f)
    block_rows, block_columns = GELU_BLOCK
    tiles = pl.cdiv(f, block_columns)
    programs, turns = _shares(shape[0], block_rows, tiles)
    run = call(
        partial(_gelu_kernel, turns),
        grid=(programs, tiles),
        inputs=[_whole(shape), _whole(shape)],
        outputs=[
            (jax.ShapeDtypeStruct(shape, biased.dtype), _whole(shape)),
            (jax.ShapeDtypeStruct((programs, f), jnp.float32), _whole((programs, f))),
        ],
        warps=WARPS,
        stages=1,
        interpret=name.endswith(INTERPRET),
        name="gelu_gradient",
    )
    gradient, sums = run(biased.reshape(shape), dy.reshape(shape))
    return gradient.reshape(biased.shape), sums.sum(0)


def _gelu_kernel(turns: int, x_ref, dy_ref, out_ref, sums_ref):
    rows, f = x_ref.shape
    block_rows, block_columns = GELU_BLOCK
    program = pl.program_id(0)
    first_column = pl.program_id(1) * block_columns
    at_columns = pl.ds(pl.multiple_of(first_column, block_columns), block_columns)
    columns = first_column + jnp.arange(block_columns) < f

    def turn(i, total):
        start = (program * turns + i) * block_rows
        mask = (start + jnp.arange(block_rows) < rows)[:, None] & columns[None]
        at = (pl.ds(start, block_rows), at_columns)
        x = load_masked(x_ref.at[at], mask).astype(jnp.float32)
        dy = load_masked(dy_ref.at[at], mask).astype(jnp.float32)
        gradient = (dy * _gelu_slope(x)).astype(out_ref.dtype)
        store_masked(out_ref.at[at], gradient, mask)
        return total + gradient.astype(jnp.float32)

    total = jax.lax.fori_loop(0, turns, turn, jnp.zeros(GELU_BLOCK, jnp.float32))
    store_masked(sums_ref.at[program, at_columns], total.sum(0), columns)


def _gelu_slope(x: jax.Array) -> jax.Array:
    """Returns the derivative of GELU in its tanh form."""
    square = x * x
    inner = GELU_FACTOR * x * (1 + GELU_CUBIC * square)
    # The sigmoid of 2 x inner is half of 1 + tanh(inner).
    sigmoid = 1 / (1 + jnp.exp(-2 * inner))
    slope = GELU_FACTOR * (1 + 3 * GELU_CUBIC * square)
    return sigmoid + 2 * x * sigmoid * (1 - sigmoid) * slope


def _shares(rows: int, block: int, others: int) -> tuple[int, int]:
    """Returns how many programs share the rows of one column of tiles, and the blocks of each.

    There are `others` such columns.
    """
    listed = find(device_kind())
    cores = CORES if listed is None else listed.cores
    blocks = pl.cdiv(rows, block)
    programs = min(blocks, max(1, PROGRAMS_OF_A_CORE * cores // others))
    return programs, pl.cdiv(blocks, programs)


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
