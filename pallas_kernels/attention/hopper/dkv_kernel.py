"""The kernel for dk and dv.

A program owns a tile of keys of one key-value head, and walks over the query heads that share them
and over their tiles of queries; scores are transposed, [keys, queries].

With head dims up to 128 each computing warpgroup has 64 keys. Above that, dk and dv of 64 keys each
fill a warpgroup's registers: one warpgroup computes dk and the other dv of the same 64 keys, and
both compute their scores.

There are two more barriers than in backward_pass.py:

    own_free[0]      computing: both have read the keys and values that they share
    done[0]          copying: both have written their results to shared memory

`i` numbers the tiles of queries.
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
from pallas_kernels.attention.tile_ranges import FULL, OVER_QUERIES, tile_bounds
from pallas_kernels.backends import mosaic as gpu
from pallas_kernels.backends.rings import Ring, fill_rings

DK, DV = 0, 1  # numbers of results


class _Scratch(NamedTuple):
    """The references to the dk and dv kernel's shared memory and barriers; see `run_dkv`.

    A program owns `tile.k` keys: one tile of 64 for each computing warpgroup, or one for both.
    """

    kv_masks: Any  # [own tiles, mask_vectors, ROWS]; None without masks
    q_masks: Any  # [q slots, mask_vectors, columns]; None without masks
    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    own_ready: Any
    q_ring: Ring  # of q, lse and masks
    dout_ring: Ring  # of dout and delta
    own_free: Any
    done: Any
    row_sums: RowSums | None  # None without a shared array
    staging: list[Any]  # two arrays; empty unless interpreted


class _Walk(NamedTuple):
    """The tiles of queries that a program visits, head by head."""

    first: Any
    count: Any  # in each head
    steps: Any  # in all heads


def _dkv_kernel(statics: ScoresStatics, bounds_ref, *refs):
    q_ref, k_ref, v_ref, refs = statics.heads.split_refs(refs)
    dout_ref, lse_ref, delta_ref, *refs = refs
    q_masks, kv_masks, refs = split_masks(statics, refs)
    [dk_ref, dv_ref], sums_ref, refs = split_results(statics, refs, 2)
    masks_s = [refs.pop(0), refs.pop(0)] if statics.mask_vectors else [None, None]
    k_s, v_s, q_s, dout_s, lse_s, delta_s, *refs = refs
    own_ready, q_ready, dout_ready, q_free, dout_free, own_free, done, *refs = refs
    row_sums = RowSums(refs.pop(0), refs.pop(0)) if statics.heads.joined else None

    program = this_program(statics.heads.keys)
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
    q_slots, dout_slots = statics.tile.stages
    scratch = _Scratch(
        *masks_s,
        k=k_s,
        v=v_s,
        q=q_s,
        dout=dout_s,
        lse=lse_s,
        delta=delta_s,
        own_ready=own_ready,
        q_ring=Ring(q_slots, q_ready, q_free),
        dout_ring=Ring(dout_slots, dout_ready, dout_free),
        own_free=own_free,
        done=done,
        row_sums=row_sums,
        staging=refs,
    )
    first = memory.bounds[0]
    last = memory.bounds[3]
    count = last - first
    walk = _Walk(first, count, steps=count * statics.heads.group)
    warpgroup = jax.lax.axis_index("warpgroup")
    pl.when(warpgroup == COMPUTING)(
        partial(_copy, statics, memory, scratch, program, walk, dk_ref, dv_ref, sums_ref)
    )
    compute = partial(_compute, statics, memory, scratch, program, walk, warpgroup)
    if statics.tile.k == COMPUTING * ROWS:
        pl.when(warpgroup < COMPUTING)(lambda: compute(warpgroup, with_dk=True, with_dv=True))
    else:
        pl.when(warpgroup == 0)(lambda: compute(0, with_dk=True, with_dv=False))
        pl.when(warpgroup == 1)(lambda: compute(0, with_dk=False, with_dv=True))


def _own_keys(statics: ScoresStatics, program: Program, tile):
    """Returns the slice of the key dim for the program's `tile`-th 64 keys."""
    return pl.ds((program.tile * (statics.tile.k // ROWS) + tile) * ROWS, ROWS)


def _copy(
    statics: ScoresStatics,
    memory: Memory,
    scratch: _Scratch,
    program: Program,
    walk: _Walk,
    dk_ref,
    dv_ref,
    sums_ref,
):
    """Runs the copying warpgroup: k and v once, then q and dout in rings, then the results."""
    batch, kv_head, at = program
    heads = statics.heads
    own_tiles = statics.tile.k // ROWS
    copying, _ = statics.tile.registers
    gpu.set_max_registers(copying, action="decrease")
    for tile in range(own_tiles):
        ready = scratch.own_ready.at[tile]
        for ref, slot, own in (
            (memory.k, heads.key_slot(kv_head), scratch.k),
            (memory.v, heads.value_slot(kv_head), scratch.v),
        ):
            keys = _own_keys(statics, program, tile)
            gpu.copy_gmem_to_smem(ref.at[batch, keys, slot], own.at[tile], ready)
        for vector, ref in enumerate(memory.kv_masks):
            keys = _own_keys(statics, program, tile)
            own = scratch.kv_masks.at[tile, vector]
            gpu.copy_gmem_to_smem(ref.at[batch, keys], own, ready)

    def copy(tile_of, into, vector_ref, vector_into, masks, step, slot, ready):
        """Copies the tile `tile_of(queries, head)`, its vector (lse or delta), and masks."""
        count = jax.lax.max(walk.count, 1)  # a divisor, but of no step if it was 0
        head = kv_head * heads.group + jax.lax.div(step, count)
        i = walk.first + jax.lax.rem(step, count)
        queries = pl.ds(i * statics.tile.q, statics.tile.q)
        gpu.copy_gmem_to_smem(tile_of(queries, head), into.at[slot], ready)
        gpu.copy_gmem_to_smem(vector_ref.at[batch, head, queries], vector_into.at[slot], ready)
        for vector, mask_ref in enumerate(masks):
            own = scratch.q_masks.at[slot, vector]
            gpu.copy_gmem_to_smem(mask_ref.at[batch, queries], own, ready)

    def tile_of_q(queries, head):
        return memory.q.at[batch, queries, heads.query_slot(head)]

    def tile_of_dout(queries, head):
        return memory.dout.at[batch, queries, head]

    copy_q = partial(copy, tile_of_q, scratch.q, memory.lse, scratch.lse, memory.q_masks)
    copy_dout = partial(copy, tile_of_dout, scratch.dout, memory.delta, scratch.delta, [])
    fill_rings(walk.steps, (scratch.q_ring, copy_q), (scratch.dout_ring, copy_dout))
    gpu.barrier_wait(scratch.done.at[0])
    for tile in range(own_tiles):
        for ref, slot, own in (
            (dk_ref, heads.key_slot(kv_head), scratch.k),
            (dv_ref, heads.value_slot(kv_head), scratch.v),
        ):
            keys = _own_keys(statics, program, tile)
            gpu.copy_smem_to_gmem(own.at[tile], ref.at[batch, keys, slot])
        if scratch.row_sums is not None:
            for number in (DK, DV):
                of_program = sums_ref.at[batch, at * own_tiles + tile, kv_head, number]
                gpu.copy_smem_to_gmem(scratch.row_sums.sums.at[number, tile], of_program)
    gpu.wait_smem_to_gmem(0)


def _compute(  # noqa: PLR0913
    statics: ScoresStatics,
    memory: Memory,
    scratch: _Scratch,
    program: Program,
    walk: _Walk,
    warpgroup,
    tile,
    *,
    with_dk: bool,
    with_dv: bool,
):
    """Runs a computing warpgroup: dk, dv or both of the program's `tile`-th 64 keys."""
    q_ring = scratch.q_ring
    dout_ring = scratch.dout_ring
    own_tiles = statics.tile.k // ROWS
    _, computing = statics.tile.registers
    gpu.set_max_registers(computing, action="increase")
    k = scratch.k.at[tile]
    v = scratch.v.at[tile]
    gpu.barrier_wait(scratch.own_ready.at[tile])

    def visit(step, carry):
        i, *sums = carry
        q_slot = q_ring.slot(step)
        dout_slot = dout_ring.slot(step)
        q = scratch.q.at[q_slot]
        dout = scratch.dout.at[dout_slot]
        gpu.barrier_wait(q_ring.ready_at(step))

        def of_columns(ref):
            return gpu.broadcast(gpu.load_shared_vector(ref, 1), statics.shape, 1)

        def weigh(products):
            """Returns (weights for dv, those times the softcap's slope for dk), given k q^T."""
            weights, slope = statics.weights(products, of_columns(scratch.lse.at[q_slot]))
            if slope is not None and not with_dv:  # the plain weights need no registers
                weights = weights * slope
                slope = None
            masks = []
            if statics.mask_vectors:
                masks = [scratch.kv_masks.at[tile], scratch.q_masks.at[q_slot]]
            full = (memory.bounds[FULL], memory.bounds[FULL + 1])
            first_row = (program.tile * own_tiles + tile) * ROWS
            weights = statics.zero_hidden(weights, full, first_row, i, masks)
            return weights.astype(v.dtype), weights if slope is None else weights * slope

        (weights, sloped), dweights = score_matmuls(
            statics,
            first=lambda into: gpu.wgmma(into, k, q.T),
            wait=lambda: gpu.barrier_wait(dout_ring.ready_at(step)),
            second=(lambda into: gpu.wgmma(into, v, dout.T)) if with_dk else None,
            use=weigh,
        )

        def staging(number):
            return scratch.staging[number].at[warpgroup] if statics.interpret else None

        def issue(*into):
            into = list(into)
            if with_dv:
                left = gpu.left_operand(weights, staging(0), statics.interpret)
                gpu.wgmma(into.pop(0), left, dout)
            if dweights is not None:  # with_dk
                delta = of_columns(scratch.delta.at[dout_slot])
                dscores = (sloped * (dweights - delta)).astype(q.dtype)
                left = gpu.left_operand(dscores, staging(1), statics.interpret)
                gpu.wgmma(into.pop(0), left, q)

        sums = gpu.accumulate_onto(tuple(sums), issue, statics.interpret)
        # dout and delta, q and lse were read until here.
        gpu.barrier_arrive(dout_ring.free.at[dout_slot])
        gpu.barrier_arrive(q_ring.free.at[q_slot])
        # After a head's last tile of queries comes the next head's first.
        next_tile = jnp.where(i + 1 == memory.bounds[3], memory.bounds[0], i + 1)
        return next_tile, *sums

    # Each result, times a factor, goes where its operand was.
    results = [(DV, v, 1.0)] * with_dv + [(DK, k, statics.problem.scale)] * with_dk
    start = tuple(gpu.full((ROWS, own.shape[1]), 0.0) for _, own, _ in results)
    _, *sums = jax.lax.fori_loop(0, walk.steps, visit, (walk.first, *start))
    if own_tiles < COMPUTING:  # the other warpgroup reads the same k and v
        gpu.barrier_arrive(scratch.own_free.at[0])
        gpu.barrier_wait(scratch.own_free.at[0])
    totals = []
    for total, (number, own, factor) in zip(sums, results, strict=True):
        totals.append((number, total * factor))
        own[...] = totals[-1][1].astype(own.dtype)
    if scratch.row_sums is not None:
        first_row = (program.tile * own_tiles + tile) * ROWS
        count = statics.lengths[1]
        padded = (first_row, count) if count % statics.tile.k else None
        sum_rows(scratch.row_sums, totals, tile, warpgroup, padded)
    gpu.commit_smem()
    # The copying warpgroup takes them from here: the addresses would take registers.
    gpu.barrier_arrive(scratch.done.at[0])


def run_dkv(
    problem: Problem,
    inputs: Inputs,
    operands: Operands,
    table: tiling.GradientTable,
    interpret: bool,
    shared: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns dk and dv in the shapes of the padded k and v.

    `shared`: the array of gradients that `run_dq` began. Then returns it whole, and the sums of the
    rows of dk and dv, [b, tiles of 64 keys, key-value heads, 2, d].
    """
    statics = make_scores_statics(problem, inputs, operands, table, OVER_QUERIES, interpret)
    b = operands.dout.shape[0]
    kv_heads = statics.heads.keys
    d, e = operands.widths
    q_length, _ = operands.lengths
    dtype = operands.dout.dtype
    tiles = pl.cdiv(inputs.lengths[1], statics.tile.k)
    own_tiles = statics.tile.k // ROWS
    q_slots, dout_slots = statics.tile.stages
    scratch = [
        *mask_scratch(statics, own_tiles),
        gpu.shared_memory((own_tiles, ROWS, d), dtype),  # k
        gpu.shared_memory((own_tiles, ROWS, e), dtype),  # v
        gpu.shared_memory((q_slots, statics.tile.q, d), dtype),
        gpu.shared_memory((dout_slots, statics.tile.q, e), dtype),
        gpu.shared_memory((q_slots, statics.tile.q), jnp.float32),  # lse
        gpu.shared_memory((dout_slots, statics.tile.q), jnp.float32),  # delta
        *ring_barriers(statics, own_tiles, arrays=2),
        gpu.barriers(1, arrivals=COMPUTING),  # own_free
        gpu.barriers(1, arrivals=COMPUTING),  # done
        *row_sums_scratch(statics, 2, own_tiles, d),
        *staging_scratch(statics, dtype),
    ]
    bytes_per_head = q_length * (d + e) * dtype.itemsize * inputs.group
    if shared is None:
        outputs = [jax.ShapeDtypeStruct(x.shape, dtype) for x in operands.qkv[1:]]
    else:
        shape = (b, tiles * own_tiles, kv_heads, 2, d)
        outputs = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    run = gpu.call(
        partial(_dkv_kernel, statics),
        grid=program_grid(b * kv_heads, tiles, bytes_per_head),
        outputs=outputs,
        scratch=scratch,
        warpgroups=COMPUTING + 1,
        interpret=interpret,
        name="attention_dkv",
    )
    bounds = tile_bounds(problem, inputs, statics.tile.q, statics.tile.k, OVER_QUERIES)
    arrays = operands.in_order()
    if shared is None:
        dk, dv = run(bounds, *arrays)
        return dk, dv
    into = jax.new_ref(shared)  # dk and dv are written beside dq
    [sums] = run(bounds, *arrays, into)
    return jax.freeze(into), sums
