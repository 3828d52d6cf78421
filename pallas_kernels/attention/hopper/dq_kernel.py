"""The kernel for dq.

A program owns COMPUTING tiles of 64 queries of one head and walks over tiles of keys. The barriers
are explained in backward_pass.py. `at` numbers the program's tile and `j` the tiles of keys.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.hopper.backward_operands import (
    Memory,
    Operands,
    make_scores_statics,
    mask_scratch,
    ring_barriers,
    split_masks,
    staging_scratch,
)
from pallas_kernels.attention.hopper.programs import (
    COMPUTING,
    ROWS,
    Program,
    bounds_of,
    program_grid,
    this_program,
)
from pallas_kernels.attention.hopper.row_sums import (
    RowSums,
    row_sums_scratch,
    split_results,
    sum_rows,
)
from pallas_kernels.attention.hopper.scores import ScoresStatics, score_matmuls
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.attention.tile_ranges import OVER_KEYS, tile_bounds
from pallas_kernels.backends import mosaic as gpu
from pallas_kernels.backends.rings import Ring, fill_rings


class _Scratch(NamedTuple):
    """The references to the dq kernel's shared memory and barriers; see `run_dq`."""

    q_masks: Any  # [COMPUTING, mask_vectors, ROWS]; None without masks
    kv_masks: Any  # [k slots, mask_vectors, columns]; None without masks
    q: Any
    dout: Any
    k: Any
    v: Any
    own_ready: Any
    k_ring: Ring
    v_ring: Ring
    row_sums: RowSums | None  # None without a shared array
    staging: Any  # None unless interpreted


def _dq_kernel(statics: ScoresStatics, bounds_ref, *refs):
    q_ref, k_ref, v_ref, refs = statics.heads.split_refs(refs)
    dout_ref, lse_ref, delta_ref, *refs = refs
    q_masks, kv_masks, refs = split_masks(statics, refs)
    [dq_ref], sums_ref, refs = split_results(statics, refs, 1)
    masks_s = [refs.pop(0), refs.pop(0)] if statics.mask_vectors else [None, None]
    q_s, dout_s, k_s, v_s, own_ready, k_ready, v_ready, k_free, v_free, *refs = refs
    row_sums = RowSums(refs.pop(0), refs.pop(0)) if statics.heads.joined else None

    program = this_program(statics.heads.queries)
    # The last tile first: if the call is causal it takes longest.
    program = program._replace(tile=jax.lax.axis_size("tile") - 1 - program.tile)
    memory = Memory(
        bounds=bounds_of(bounds_ref, program),
        q=q_ref,
        k=k_ref,
        v=v_ref,
        dout=dout_ref,
        lse=lse_ref,
        delta=delta_ref,
        q_masks=q_masks,
        kv_masks=kv_masks,
    )
    k_slots, v_slots = statics.tile.stages
    scratch = _Scratch(
        *masks_s,
        q=q_s,
        dout=dout_s,
        k=k_s,
        v=v_s,
        own_ready=own_ready,
        k_ring=Ring(k_slots, k_ready, k_free),
        v_ring=Ring(v_slots, v_ready, v_free),
        row_sums=row_sums,
        staging=refs[0] if statics.interpret else None,
    )
    warpgroup = jax.lax.axis_index("warpgroup")
    pl.when(warpgroup == COMPUTING)(partial(_copy, statics, memory, scratch, program))
    pl.when(warpgroup < COMPUTING)(
        partial(_compute, statics, memory, scratch, program, warpgroup, dq_ref, sums_ref)
    )


def _own_queries(program: Program, warpgroup):
    """Returns the slice of the query dim that a computing warpgroup of the dq kernel owns."""
    return pl.ds((program.tile * COMPUTING + warpgroup) * ROWS, ROWS)


def _copy(statics: ScoresStatics, memory: Memory, scratch: _Scratch, program: Program):
    """Runs the copying warpgroup: q and dout once, then k and v in rings."""
    batch, head, _ = program
    copying, _ = statics.tile.registers
    gpu.set_max_registers(copying, action="decrease")
    heads = statics.heads
    kv_head = heads.of_keys(head)
    first = memory.bounds[0]
    last = memory.bounds[3]
    for warpgroup in range(COMPUTING):
        ready = scratch.own_ready.at[warpgroup]
        q_slot = heads.query_slot(head)
        for ref, slot, own in ((memory.q, q_slot, scratch.q), (memory.dout, head, scratch.dout)):
            queries = _own_queries(program, warpgroup)
            gpu.copy_gmem_to_smem(ref.at[batch, queries, slot], own.at[warpgroup], ready)
        for vector, ref in enumerate(memory.q_masks):
            queries = _own_queries(program, warpgroup)
            own = scratch.q_masks.at[warpgroup, vector]
            gpu.copy_gmem_to_smem(ref.at[batch, queries], own, ready)

    k_slot = heads.key_slot(kv_head)
    v_slot = heads.value_slot(kv_head)

    def copy(ref, place, into, masks, step, slot, ready):
        keys = pl.ds((first + step) * statics.tile.k, statics.tile.k)
        gpu.copy_gmem_to_smem(ref.at[batch, keys, place], into.at[slot], ready)
        for vector, mask_ref in enumerate(masks):
            own = scratch.kv_masks.at[slot, vector]
            gpu.copy_gmem_to_smem(mask_ref.at[batch, keys], own, ready)

    fill_rings(
        last - first,
        (scratch.k_ring, partial(copy, memory.k, k_slot, scratch.k, memory.kv_masks)),
        (scratch.v_ring, partial(copy, memory.v, v_slot, scratch.v, [])),
    )


def _compute(  # noqa: PLR0913
    statics: ScoresStatics,
    memory: Memory,
    scratch: _Scratch,
    program: Program,
    warpgroup,
    dq_ref,
    sums_ref,
):
    """Runs a computing warpgroup: dq of its 64 queries, over tiles of keys."""
    batch, head, at = program
    k_ring = scratch.k_ring
    v_ring = scratch.v_ring
    _, computing = statics.tile.registers
    gpu.set_max_registers(computing, action="increase")
    own = (batch, head, _own_queries(program, warpgroup))
    # Held in registers: in this kernel they do not spill.
    first, full_from, full_to, last = (memory.bounds[bound] for bound in range(4))
    q = scratch.q.at[warpgroup]
    dout = scratch.dout.at[warpgroup]
    gpu.barrier_wait(scratch.own_ready.at[warpgroup])
    lse = gpu.load_global_vector(memory.lse.at[own], 0)
    delta = gpu.load_global_vector(memory.delta.at[own], 0)
    first_row = (at * COMPUTING + warpgroup) * ROWS

    def visit(step, dq):
        j = first + step
        k_slot = k_ring.slot(step)
        v_slot = v_ring.slot(step)
        k = scratch.k.at[k_slot]
        v = scratch.v.at[v_slot]
        gpu.barrier_wait(k_ring.ready_at(step))

        def weigh(products):  # q k^T, [64 queries, tile.k]
            weights, slope = statics.weights(products, gpu.broadcast(lse, statics.shape, 0))
            if slope is not None:
                weights = weights * slope
            masks = []
            if statics.mask_vectors:
                masks = [scratch.q_masks.at[warpgroup], scratch.kv_masks.at[k_slot]]
            return statics.zero_hidden(weights, (full_from, full_to), first_row, j, masks)

        weights, dweights = score_matmuls(
            statics,
            first=lambda into: gpu.wgmma(into, q, k.T),
            wait=lambda: gpu.barrier_wait(v_ring.ready_at(step)),
            second=lambda into: gpu.wgmma(into, dout, v.T),
            use=weigh,
        )
        gpu.barrier_arrive(v_ring.free.at[v_slot])  # v is not needed again, k is
        assert dweights is not None, "the second matmul was asked for"
        dscores = weights * (dweights - gpu.broadcast(delta, statics.shape, 0))
        dscores = dscores.astype(q.dtype)
        staging = None if scratch.staging is None else scratch.staging.at[warpgroup]
        left = gpu.left_operand(dscores, staging, statics.interpret)
        [dq] = gpu.accumulate_onto((dq,), lambda into: gpu.wgmma(into, left, k), statics.interpret)
        gpu.barrier_arrive(k_ring.free.at[k_slot])
        return dq

    dq = jax.lax.fori_loop(0, last - first, visit, gpu.full((ROWS, q.shape[1]), 0.0))
    dq = dq * statics.problem.scale
    q[...] = dq.astype(q.dtype)  # its queries are no longer needed
    if scratch.row_sums is not None:  # rows beyond the last query are 0
        sum_rows(scratch.row_sums, [(0, dq)], warpgroup, warpgroup)
    gpu.commit_smem()
    slot = statics.heads.query_slot(head)
    gpu.copy_smem_to_gmem(q, dq_ref.at[batch, _own_queries(program, warpgroup), slot])
    if scratch.row_sums is not None:
        of_program = sums_ref.at[batch, at * COMPUTING + warpgroup, head]
        gpu.copy_smem_to_gmem(scratch.row_sums.sums.at[0, warpgroup], of_program)
    gpu.wait_smem_to_gmem(0)


def run_dq(
    problem: Problem,
    inputs: Inputs,
    operands: Operands,
    table: tiling.GradientTable,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns dq in the shape of the padded q, and None.

    With a shared array: that of the gradients, of which those of queries are made, and the sums of
    the rows of dq, [b, tiles of 64 queries, h, d].
    """
    statics = make_scores_statics(problem, inputs, operands, table, OVER_KEYS, interpret)
    b = operands.dout.shape[0]
    h = statics.heads.queries
    d, e = operands.widths
    _, kv_length = operands.lengths
    dtype = operands.dout.dtype
    tiles = pl.cdiv(inputs.lengths[0], statics.tile.q)
    outputs = [jax.ShapeDtypeStruct(operands.qkv[0].shape, dtype)]
    if operands.is_joined:
        outputs += [jax.ShapeDtypeStruct((b, tiles * COMPUTING, h, d), jnp.float32)]
    k_slots, v_slots = statics.tile.stages
    scratch = [
        *mask_scratch(statics, COMPUTING),
        gpu.shared_memory((COMPUTING, ROWS, d), dtype),  # q
        gpu.shared_memory((COMPUTING, ROWS, e), dtype),  # dout
        gpu.shared_memory((k_slots, statics.tile.k, d), dtype),
        gpu.shared_memory((v_slots, statics.tile.k, e), dtype),
        *ring_barriers(statics, COMPUTING, arrays=1),
        *row_sums_scratch(statics, 1, COMPUTING, d),
        *staging_scratch(statics, dtype),
    ]
    bytes_per_head = kv_length * (d + e) * dtype.itemsize // inputs.group
    run = gpu.call(
        partial(_dq_kernel, statics),
        grid=program_grid(b * h, tiles, bytes_per_head),
        outputs=outputs,
        scratch=scratch,
        warpgroups=COMPUTING + 1,
        interpret=interpret,
        name="attention_dq",
    )
    bounds = tile_bounds(problem, inputs, statics.tile.q, statics.tile.k, OVER_KEYS)
    dq, *sums = run(bounds, *operands.in_order())
    return dq, sums[0] if sums else None
