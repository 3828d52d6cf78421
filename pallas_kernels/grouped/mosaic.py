"""Implements the grouped matmul for NVIDIA's Hopper (sm_90), on Mosaic GPU.

A program makes a block of SIDE x SIDE of the result, y or one expert's dw, as a sum of products of
a left and a right operand, over STEP of the contracted dim at a time. Warpgroup 2 copies them into
a ring of shared memory, and the others compute ROWS rows of the block each. A block without an
expert, or an expert without tiles, takes no steps: its sum is 0. There are no atomics, and every
sum has a fixed order.

Barriers: `ready[slot]`, for which the computing warpgroups wait: the operands of a step are there;
`free[slot]`, for which the copying one waits: both have read them.

Letters as in xla.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backends import mosaic as gpu
from pallas_kernels.backends.rings import Ring, fill_rings
from pallas_kernels.calls import GroupedCall
from pallas_kernels.choose import INTERPRET, VARIANT
from pallas_kernels.grouped.tiles import order_by_expert

COMPUTING = 2  # warpgroups
ROWS = 64  # of a wgmma
SIDE = COMPUTING * ROWS  # of a program's block of the result
STEP = 64  # of the contracted dim
SLOTS = 4  # of the ring
# Slots of other rings, which are tried when kernels are measured: with "mosaic/shallow" two
# programs fit a core's shared memory.
VARIANTS = {"shallow": 2}
DTYPES = ("bfloat16", "float16")


def refusal(call: GroupedCall, interpreted: bool) -> str:
    rows, k, n = call.rows, call.width, call.out_width
    if call.dtype not in DTYPES:
        return f"bfloat16 and float16, not {call.dtype}"
    if call.tile % SIDE:
        return f"tiles of a multiple of {SIDE} rows, not {call.tile}"
    if k % SIDE or n % SIDE:
        return f"widths that are multiples of {SIDE}, not {k} and {n}"
    if max(rows * k, rows * n, call.experts * k * n) >= 2**31:
        return "arrays of fewer than 2^31 elements: offsets are 32 bits"
    return gpu.refusal(interpreted)


class _Block(NamedTuple):
    """A program's work: copies of a step's operands, and where the sum of `steps` products goes."""

    steps: Any
    # copy(step, into, ready) copies an operand; the left one in parts of ROWS for each warpgroup.
    copy_left: Callable
    copy_right: Callable
    # Reads the operands of a wgmma in [ROWS, STEP] x [STEP, SIDE].
    left: Callable
    right: Callable
    out: Callable  # the place of a warpgroup's rows of the result


def multiply(x_rk, w_xkn, expert_t, transposed: bool, name: str):
    """Does what `xla.multiply` does."""
    rows, k = x_rk.shape
    n = w_xkn.shape[1 if transposed else 2]
    blocks = rows // SIDE
    expert_b = jnp.repeat(expert_t, blocks // expert_t.shape[0], total_repeat_length=blocks)
    right = (SIDE, STEP) if transposed else (STEP, SIDE)
    run = _call(
        partial(_multiply_block, transposed),
        grid={"block": blocks, "column": n // SIDE},
        operands=((ROWS, STEP), right),
        out=jax.ShapeDtypeStruct((rows, n), x_rk.dtype),
        implementation=name,
        name="grouped_matmul",
    )
    return run(expert_b, x_rk, w_xkn)[0]


def _multiply_block(transposed, expert_ref, x_ref, w_ref, y_ref) -> _Block:
    block = jax.lax.axis_index("block")
    columns = pl.ds(jax.lax.axis_index("column") * SIDE, SIDE)
    expert = expert_ref[block]

    def own_rows(warpgroup):
        return pl.ds(block * SIDE + warpgroup * ROWS, ROWS)

    def copy_left(step, warpgroup, into, ready):
        gpu.copy_gmem_to_smem(x_ref.at[own_rows(warpgroup), pl.ds(step * STEP, STEP)], into, ready)

    def copy_right(step, into, ready):
        contracted = pl.ds(step * STEP, STEP)
        at = (columns, contracted) if transposed else (contracted, columns)
        gpu.copy_gmem_to_smem(w_ref.at[(expert, *at)], into, ready)

    return _Block(
        steps=jnp.where(expert < 0, 0, x_ref.shape[1] // STEP),
        copy_left=copy_left,
        copy_right=copy_right,
        left=lambda ref: ref,
        right=lambda ref: ref.T if transposed else ref,
        out=lambda warpgroup: y_ref.at[own_rows(warpgroup), columns],
    )


def weights_gradient(x_rk, dy_rn, expert_t, experts: int, name: str):
    """Does what `xla.weights_gradient` does."""
    k, n = x_rk.shape[1], dy_rn.shape[1]
    count_x = (expert_t == jnp.arange(experts)[:, None]).sum(1).astype(jnp.int32)
    first_x = (jnp.cumsum(count_x) - count_x).astype(jnp.int32)
    run = _call(
        partial(_weights_block, x_rk.shape[0] // expert_t.shape[0]),
        grid={"row": k // SIDE, "column": n // SIDE, "expert": experts},
        operands=((STEP, ROWS), (STEP, SIDE)),
        out=jax.ShapeDtypeStruct((experts, k, n), x_rk.dtype),
        implementation=name,
        name="grouped_matmul_weights",
    )
    return run(order_by_expert(expert_t, experts), first_x, count_x, x_rk, dy_rn)[0]


def _weights_block(tile_rows, tile_ref, first_ref, count_ref, x_ref, dy_ref, dw_ref) -> _Block:
    expert = jax.lax.axis_index("expert")
    columns = pl.ds(jax.lax.axis_index("column") * SIDE, SIDE)
    cuts = tile_rows // STEP

    def own_rows(warpgroup):
        return pl.ds(jax.lax.axis_index("row") * SIDE + warpgroup * ROWS, ROWS)

    def contracted(step):
        tile = tile_ref[first_ref[expert] + jax.lax.div(step, cuts)]
        return pl.ds(tile * tile_rows + jax.lax.rem(step, cuts) * STEP, STEP)

    def copy_left(step, warpgroup, into, ready):
        gpu.copy_gmem_to_smem(x_ref.at[contracted(step), own_rows(warpgroup)], into, ready)

    def copy_right(step, into, ready):
        gpu.copy_gmem_to_smem(dy_ref.at[contracted(step), columns], into, ready)

    return _Block(
        steps=count_ref[expert] * cuts,
        copy_left=copy_left,
        copy_right=copy_right,
        left=lambda ref: ref.T,
        right=lambda ref: ref,
        out=lambda warpgroup: dw_ref.at[expert, own_rows(warpgroup), columns],
    )


def _call(block_of, *, grid, operands, out, implementation: str, name: str):
    """Returns a function of arrays that runs `block_of(*inputs, output)` in each program.

    `implementation`: its name, with its variant.
    """
    left, right = operands
    slots = VARIANTS.get(implementation.removesuffix(INTERPRET).partition(VARIANT)[2], SLOTS)
    return gpu.call(
        partial(_kernel, block_of, slots),
        grid=grid,
        outputs=[out],
        scratch=[
            gpu.shared_memory((slots, COMPUTING, *left), out.dtype),
            gpu.shared_memory((slots, *right), out.dtype),
            gpu.shared_memory((COMPUTING, ROWS, SIDE), out.dtype),
            gpu.barriers(slots, arrivals=COMPUTING + 1),  # ready: a copy each
            gpu.barriers(slots, arrivals=COMPUTING),  # free
        ],
        warpgroups=COMPUTING + 1,
        interpret=implementation.endswith(INTERPRET),
        name=name,
    )


def _kernel(block_of, slots, *refs):
    *arrays, left_s, right_s, out_s, ready, free = refs
    block = block_of(*arrays)
    ring = Ring(slots, ready, free)
    warpgroup = jax.lax.axis_index("warpgroup")

    def copy(step, slot, slot_ready):
        for part in range(COMPUTING):
            block.copy_left(step, part, left_s.at[slot, part], slot_ready)
        block.copy_right(step, right_s.at[slot], slot_ready)

    @pl.when(warpgroup == COMPUTING)
    def _():
        fill_rings(block.steps, (ring, copy))

    @pl.when(warpgroup < COMPUTING)
    def _():
        total = gpu.accumulate_from_zero(
            partial(_multiply_steps, block, ring, left_s, right_s, warpgroup), (ROWS, SIDE)
        )
        pl.when(block.steps > 0)(lambda: _free(ring, block.steps - 1))
        own = out_s.at[warpgroup]
        own[...] = total.astype(own.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(own, block.out(warpgroup))
        gpu.wait_smem_to_gmem(0)


def _multiply_steps(block: _Block, ring: Ring, left_s, right_s, warpgroup, into):
    """Issues each step's product onto `into`; a slot is free once the next product is issued."""

    @pl.loop(0, block.steps)
    def _(step):
        slot = ring.slot(step)
        gpu.barrier_wait(ring.ready_at(step))
        left = block.left(left_s.at[slot, warpgroup])
        gpu.wgmma(into, left, block.right(right_s.at[slot]))
        gpu.wgmma_wait(1)  # all but the one just issued are done
        pl.when(step > 0)(lambda: _free(ring, step - 1))


def _free(ring: Ring, step) -> None:
    gpu.barrier_arrive(ring.free.at[ring.slot(step)])
