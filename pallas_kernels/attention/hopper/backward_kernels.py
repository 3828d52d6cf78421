"""The backward pass on Hopper: a kernel for dq, then one for dk and dv; every sum has one order.

A program of the dq kernel owns COMPUTING tiles of 64 queries and walks over tiles of keys. One of
the other kernel owns a tile of keys, and walks over the query heads that share them and over their
tiles of queries; its scores are transposed, [keys, queries].

In both, one warpgroup copies through two rings (rings.py) and two compute. A computing warpgroup
owns 64 rows of scores, which become the left operand of the next matmul without leaving its
registers. Where a head dim is above 128, dk and dv of 64 keys fill a warpgroup's registers each:
then one warpgroup computes dk and the other dv of the same 64 keys, and both compute their scores.

Barriers, by who waits for what:

    own_ready[w]     computing: the program's own tiles of warpgroup w have been copied
    *_ready[slot]    computing: a tile is in this slot of the ring
    *_free[slot]     copying: both computing warpgroups have read this slot
    own_free[0]      computing: both have read the own tiles that they share
    done[0]          copying: both have written their results to shared memory

Letters as in problem.py; `at` numbers the program's tile, `step` the tiles that it walks over.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.hopper.programs import (
    COMPUTING,
    ROWS,
    Program,
    bounds_of,
    program_grid,
    this_program,
)
from pallas_kernels.attention.hopper.rings import Ring, fill_rings
from pallas_kernels.attention.hopper.scores import ScoresPlan, score_matmuls
from pallas_kernels.attention.mask import visible_keys, zero_hidden
from pallas_kernels.attention.operands import (
    pad_mask_operands,
    pad_to,
    round_up,
    split_mask_operands,
)
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.attention.tile_ranges import (
    FULL,
    OVER_KEYS,
    OVER_QUERIES,
    possible_ranges,
    tile_bounds,
)
from pallas_kernels.backends import mosaic as gpu

LENGTH_MULTIPLE = COMPUTING * ROWS  # of padded lengths: whole tiles of both kernels


class _Global(NamedTuple):
    """References to global memory."""

    bounds: Any  # of this program's tile
    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # [b, h, t], in units of log 2
    delta: Any  # [b, h, t]
    q_masks: list[Any]  # [b, t]: segment ids, positions; those that exist
    kv_masks: list[Any]  # [b, s]


def _split_masks(plan: ScoresPlan, refs) -> tuple[list[Any], list[Any], list[Any]]:
    """(q_masks, kv_masks, the references behind them)"""
    masks, rest = split_mask_operands(refs, plan.has_segments, plan.has_positions)
    q_masks = [x for x in (masks.q_segment_ids, masks.q_positions) if x is not None]
    kv_masks = [x for x in (masks.kv_segment_ids, masks.kv_positions) if x is not None]
    return q_masks, kv_masks, rest


# dq


class _DqScratch(NamedTuple):
    """References to the dq kernel's shared memory and barriers; see `_run_dq`."""

    q_masks: Any  # [COMPUTING, mask_vectors, ROWS]; None without masks
    kv_masks: Any  # [k slots, mask_vectors, columns]; None without masks
    q: Any
    dout: Any
    k: Any
    v: Any
    own_ready: Any
    k_ring: Ring
    v_ring: Ring
    staging: Any  # None unless interpreted


def _dq_kernel(
    plan: ScoresPlan, bounds_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs
):
    q_masks, kv_masks, refs = _split_masks(plan, refs)
    dq_ref, *refs = refs
    mask_scratch = [refs.pop(0), refs.pop(0)] if plan.mask_vectors else [None, None]
    q_s, dout_s, k_s, v_s, own_ready, k_ready, v_ready, k_free, v_free, *staging = refs

    program = this_program(q_ref.shape[2])
    # The last tile first: where the call is causal it takes longest.
    program = program._replace(tile=jax.lax.axis_size("tile") - 1 - program.tile)
    memory = _Global(
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
    k_slots, v_slots = plan.tile.stages
    scratch = _DqScratch(
        *mask_scratch,
        q=q_s,
        dout=dout_s,
        k=k_s,
        v=v_s,
        own_ready=own_ready,
        k_ring=Ring(k_slots, k_ready, k_free),
        v_ring=Ring(v_slots, v_ready, v_free),
        staging=staging[0] if plan.interpret else None,
    )
    warpgroup = jax.lax.axis_index("warpgroup")
    pl.when(warpgroup == COMPUTING)(partial(_dq_copy, plan, memory, scratch, program))
    pl.when(warpgroup < COMPUTING)(
        partial(_dq_compute, plan, memory, scratch, program, warpgroup, dq_ref)
    )


def _own_queries(program: Program, warpgroup):
    """The slice of the query dim that a computing warpgroup of the dq kernel owns."""
    return pl.ds((program.tile * COMPUTING + warpgroup) * ROWS, ROWS)


def _dq_copy(plan: ScoresPlan, memory: _Global, scratch: _DqScratch, program: Program):
    """The copying warpgroup's part: q and dout once, then k and v in rings."""
    batch, head, _ = program
    copying, _ = plan.tile.registers
    gpu.set_max_registers(copying, action="decrease")
    kv_head = jax.lax.div(head, plan.group)
    first = memory.bounds[0]
    last = memory.bounds[3]
    for warpgroup in range(COMPUTING):
        ready = scratch.own_ready.at[warpgroup]
        for ref, own in ((memory.q, scratch.q), (memory.dout, scratch.dout)):
            queries = _own_queries(program, warpgroup)
            gpu.copy_gmem_to_smem(ref.at[batch, queries, head], own.at[warpgroup], ready)
        for vector, ref in enumerate(memory.q_masks):
            queries = _own_queries(program, warpgroup)
            own = scratch.q_masks.at[warpgroup, vector]
            gpu.copy_gmem_to_smem(ref.at[batch, queries], own, ready)

    def copy(ref, into, masks, step, slot, ready):
        keys = pl.ds((first + step) * plan.tile.k, plan.tile.k)
        gpu.copy_gmem_to_smem(ref.at[batch, keys, kv_head], into.at[slot], ready)
        for vector, mask_ref in enumerate(masks):
            own = scratch.kv_masks.at[slot, vector]
            gpu.copy_gmem_to_smem(mask_ref.at[batch, keys], own, ready)

    fill_rings(
        last - first,
        (scratch.k_ring, partial(copy, memory.k, scratch.k, memory.kv_masks)),
        (scratch.v_ring, partial(copy, memory.v, scratch.v, [])),
    )


def _dq_compute(
    plan: ScoresPlan, memory: _Global, scratch: _DqScratch, program: Program, warpgroup, dq_ref
):
    """A computing warpgroup's part: dq of its 64 queries, over tiles of keys."""
    batch, head, at = program
    k_ring = scratch.k_ring
    v_ring = scratch.v_ring
    _, computing = plan.tile.registers
    gpu.set_max_registers(computing, action="increase")
    own = (batch, head, _own_queries(program, warpgroup))
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

        def weigh(products):
            weights, slope = plan.weights(products, gpu.broadcast(lse, plan.shape, 0))
            if slope is not None:
                weights = weights * slope
            masks = []
            if plan.mask_vectors:
                masks = [scratch.q_masks.at[warpgroup], scratch.kv_masks.at[k_slot]]
            return plan.zero_hidden(weights, (full_from, full_to), first_row, j, masks)

        weights, dweights = score_matmuls(
            plan,
            first=lambda into: gpu.wgmma(into, q, k.T),
            wait=lambda: gpu.barrier_wait(v_ring.ready_at(step)),
            second=lambda into: gpu.wgmma(into, dout, v.T),
            use=weigh,
        )
        gpu.barrier_arrive(v_ring.free.at[v_slot])
        dscores = weights * (dweights - gpu.broadcast(delta, plan.shape, 0))
        dscores = dscores.astype(q.dtype)
        staging = None if scratch.staging is None else scratch.staging.at[warpgroup]
        left = gpu.left_operand(dscores, staging, plan.interpret)
        [dq] = gpu.accumulate_onto((dq,), lambda into: gpu.wgmma(into, left, k), plan.interpret)
        gpu.barrier_arrive(k_ring.free.at[k_slot])
        return dq

    dq = jax.lax.fori_loop(0, last - first, visit, gpu.full((ROWS, q.shape[1]), 0.0))
    q[...] = (dq * plan.problem.scale).astype(q.dtype)  # its queries are no longer needed
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(q, dq_ref.at[batch, _own_queries(program, warpgroup), head])
    gpu.wait_smem_to_gmem(0)


# dk and dv


class _DkvScratch(NamedTuple):
    """References to the dk and dv kernel's shared memory and barriers; see `_run_dkv`.

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
    staging: list[Any]  # two arrays; empty unless interpreted


def _dkv_kernel(
    plan: ScoresPlan, bounds_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs
):
    q_masks, kv_masks, refs = _split_masks(plan, refs)
    dk_ref, dv_ref, *refs = refs
    mask_scratch = [refs.pop(0), refs.pop(0)] if plan.mask_vectors else [None, None]
    k_s, v_s, q_s, dout_s, lse_s, delta_s, *refs = refs
    own_ready, q_ready, dout_ready, q_free, dout_free, own_free, done, *staging = refs

    program = this_program(k_ref.shape[2])
    memory = _Global(
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
    q_slots, dout_slots = plan.tile.stages
    scratch = _DkvScratch(
        *mask_scratch,
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
        staging=staging,
    )
    first = memory.bounds[0]
    last = memory.bounds[3]
    count = last - first
    steps = count * plan.group
    warpgroup = jax.lax.axis_index("warpgroup")
    pl.when(warpgroup == COMPUTING)(
        partial(_dkv_copy, plan, memory, scratch, program, (first, count, steps), dk_ref, dv_ref)
    )
    compute = partial(_dkv_compute, plan, memory, scratch, program, (first, steps), warpgroup)
    if plan.tile.k == COMPUTING * ROWS:
        pl.when(warpgroup < COMPUTING)(lambda: compute(warpgroup, with_dk=True, with_dv=True))
    else:
        pl.when(warpgroup == 0)(lambda: compute(0, with_dk=True, with_dv=False))
        pl.when(warpgroup == 1)(lambda: compute(0, with_dk=False, with_dv=True))


def _own_keys(plan: ScoresPlan, program: Program, tile):
    """The slice of the key dim that the program's `tile`-th 64 keys are."""
    return pl.ds((program.tile * (plan.tile.k // ROWS) + tile) * ROWS, ROWS)


def _dkv_copy(
    plan: ScoresPlan, memory: _Global, scratch: _DkvScratch, program: Program, walk, dk_ref, dv_ref
):
    """The copying warpgroup's part: k and v once, then q and dout in rings, then the results.

    `walk`: the first tile of queries, how many there are of each head, and of all heads.
    """
    batch, kv_head, _ = program
    first, count, steps = walk
    own_tiles = plan.tile.k // ROWS
    copying, _ = plan.tile.registers
    gpu.set_max_registers(copying, action="decrease")
    for tile in range(own_tiles):
        ready = scratch.own_ready.at[tile]
        for ref, own in ((memory.k, scratch.k), (memory.v, scratch.v)):
            keys = _own_keys(plan, program, tile)
            gpu.copy_gmem_to_smem(ref.at[batch, keys, kv_head], own.at[tile], ready)
        for vector, ref in enumerate(memory.kv_masks):
            keys = _own_keys(plan, program, tile)
            own = scratch.kv_masks.at[tile, vector]
            gpu.copy_gmem_to_smem(ref.at[batch, keys], own, ready)

    def copy(ref, into, vector_ref, vector_into, masks, step, slot, ready):
        """A tile, its vector (lse or delta), and masks."""
        some = jax.lax.max(count, 1)
        head = kv_head * plan.group + jax.lax.div(step, some)
        queries = pl.ds((first + jax.lax.rem(step, some)) * plan.tile.q, plan.tile.q)
        gpu.copy_gmem_to_smem(ref.at[batch, queries, head], into.at[slot], ready)
        gpu.copy_gmem_to_smem(vector_ref.at[batch, head, queries], vector_into.at[slot], ready)
        for vector, mask_ref in enumerate(masks):
            own = scratch.q_masks.at[slot, vector]
            gpu.copy_gmem_to_smem(mask_ref.at[batch, queries], own, ready)

    copy_q = partial(copy, memory.q, scratch.q, memory.lse, scratch.lse, memory.q_masks)
    copy_dout = partial(copy, memory.dout, scratch.dout, memory.delta, scratch.delta, [])
    fill_rings(steps, (scratch.q_ring, copy_q), (scratch.dout_ring, copy_dout))
    gpu.barrier_wait(scratch.done.at[0])
    for tile in range(own_tiles):
        for ref, own in ((dk_ref, scratch.k), (dv_ref, scratch.v)):
            keys = _own_keys(plan, program, tile)
            gpu.copy_smem_to_gmem(own.at[tile], ref.at[batch, keys, kv_head])
    gpu.wait_smem_to_gmem(0)


def _dkv_compute(  # noqa: PLR0913
    plan: ScoresPlan,
    memory: _Global,
    scratch: _DkvScratch,
    program: Program,
    walk,
    warpgroup,
    tile,
    *,
    with_dk: bool,
    with_dv: bool,
):
    """A computing warpgroup's part: dk, dv or both of the program's `tile`-th 64 keys.

    `walk`: the first tile of queries, and how many there are of all heads.
    """
    first, steps = walk
    q_ring = scratch.q_ring
    dout_ring = scratch.dout_ring
    own_tiles = plan.tile.k // ROWS
    _, computing = plan.tile.registers
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
            return gpu.broadcast(gpu.load_shared_vector(ref, 1), plan.shape, 1)

        def weigh(products):
            """(weights for dv, weights times the softcap's derivative for dk)"""
            weights, slope = plan.weights(products, of_columns(scratch.lse.at[q_slot]))
            if slope is not None and not with_dv:  # the plain weights need no registers
                weights = weights * slope
                slope = None
            masks = []
            if plan.mask_vectors:
                masks = [scratch.kv_masks.at[tile], scratch.q_masks.at[q_slot]]
            full = (memory.bounds[FULL], memory.bounds[FULL + 1])
            first_row = (program.tile * own_tiles + tile) * ROWS
            weights = plan.zero_hidden(weights, full, first_row, i, masks)
            return weights.astype(v.dtype), weights if slope is None else weights * slope

        (weights, sloped), dweights = score_matmuls(
            plan,
            first=lambda into: gpu.wgmma(into, k, q.T),
            wait=lambda: gpu.barrier_wait(dout_ring.ready_at(step)),
            second=(lambda into: gpu.wgmma(into, v, dout.T)) if with_dk else None,
            use=weigh,
        )

        def staging(number):
            return scratch.staging[number].at[warpgroup] if plan.interpret else None

        def issue(*into):
            into = list(into)
            if with_dv:
                left = gpu.left_operand(weights, staging(0), plan.interpret)
                gpu.wgmma(into.pop(0), left, dout)
            if with_dk:
                delta = of_columns(scratch.delta.at[dout_slot])
                dscores = (sloped * (dweights - delta)).astype(q.dtype)
                left = gpu.left_operand(dscores, staging(1), plan.interpret)
                gpu.wgmma(into.pop(0), left, q)

        sums = gpu.accumulate_onto(tuple(sums), issue, plan.interpret)
        gpu.barrier_arrive(dout_ring.free.at[dout_slot])
        gpu.barrier_arrive(q_ring.free.at[q_slot])
        # After a head's last tile of queries comes the next head's first.
        next_tile = jnp.where(i + 1 == memory.bounds[3], memory.bounds[0], i + 1)
        return next_tile, *sums

    # Each result goes where its own operand was, times a factor.
    results = [(v, 1.0)] * with_dv + [(k, plan.problem.scale)] * with_dk
    start = tuple(gpu.full((ROWS, own.shape[1]), 0.0) for own, _ in results)
    _, *sums = jax.lax.fori_loop(0, steps, visit, (first, *start))
    if own_tiles < COMPUTING:  # the other warpgroup reads the same k and v
        gpu.barrier_arrive(scratch.own_free.at[0])
        gpu.barrier_wait(scratch.own_free.at[0])
    for total, (own, factor) in zip(sums, results, strict=True):
        own[...] = (total * factor).astype(own.dtype)
    gpu.commit_smem()
    # The copying warpgroup takes them from here: the addresses would take registers.
    gpu.barrier_arrive(scratch.done.at[0])


# Launch


class _Operands(NamedTuple):
    """Padded to multiples of LENGTH_MULTIPLE in time and of SWIZZLE_ELEMENTS in head dims."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    masks: list[jax.Array]  # those that exist, in the order of MaskOperands


def backward(problem: Problem, inputs: Inputs, out, lse, dout, dlse, *, interpret: bool = False):
    """As `xla.backward`; no bias, so no gradient of it."""
    t, s = inputs.lengths
    d = inputs.k_bskd.shape[3]
    e = inputs.v_bske.shape[3]
    operands = _pad_operands(problem, inputs, out, lse, dout, dlse)
    dq = _run_dq(problem, inputs, operands, interpret)
    dk, dv = _run_dkv(problem, inputs, operands, interpret)
    return dq[:, :t, :, :d], dk[:, :s, :, :d], dv[:, :s, :, :e], None


def _pad_operands(problem: Problem, inputs: Inputs, out, lse, dout, dlse) -> _Operands:
    """Rows that see nothing, or that nothing sees, are set to 0: they may hold NaN."""
    b, t, h, d = inputs.q_bthd.shape
    _, s, kv_heads, e = inputs.v_bske.shape
    sees_nothing = jnp.isneginf(lse)
    d_padded = round_up(d, gpu.SWIZZLE_ELEMENTS)
    e_padded = round_up(e, gpu.SWIZZLE_ELEMENTS)
    q_length = round_up(t, LENGTH_MULTIPLE)
    kv_length = round_up(s, LENGTH_MULTIPLE)

    def pad_vector(x_bth):
        x_bht = jnp.moveaxis(jnp.where(sees_nothing, 0, x_bth), 2, 1)
        return pad_to(x_bht, (b, h, q_length))

    def zero_blind(x):
        if inputs.mask_is_static and t <= s:  # every query sees a key: its own
            return x
        return jnp.where(sees_nothing[..., None], 0, x)

    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    lse = pad_vector(lse * gpu.LOG2E)
    delta = pad_vector(delta)
    q = zero_blind(inputs.q_bthd)
    dout = zero_blind(dout)
    visible = visible_keys(problem, inputs)
    q = pad_to(q, (b, q_length, h, d_padded))
    dout = pad_to(dout, (b, q_length, h, e_padded))
    k = pad_to(zero_hidden(inputs.k_bskd, visible), (b, kv_length, kv_heads, d_padded))
    v = pad_to(zero_hidden(inputs.v_bske, visible), (b, kv_length, kv_heads, e_padded))
    masks = pad_mask_operands(inputs, q_length, kv_length)
    return _Operands(q, k, v, dout, lse, delta, [x for x in masks if x is not None])


def _run_dq(problem: Problem, inputs: Inputs, operands: _Operands, interpret: bool) -> jax.Array:
    plan = _plan(problem, inputs, operands, tiling.HOPPER_DQ, OVER_KEYS, interpret)
    b, _, h, d = operands.q.shape
    _, kv_length, _, e = operands.v.shape
    dtype = operands.q.dtype
    k_slots, v_slots = plan.tile.stages
    scratch = [
        *_mask_scratch(plan, COMPUTING),
        gpu.shared_memory((COMPUTING, ROWS, d), dtype),  # q
        gpu.shared_memory((COMPUTING, ROWS, e), dtype),  # dout
        gpu.shared_memory((k_slots, plan.tile.k, d), dtype),
        gpu.shared_memory((v_slots, plan.tile.k, e), dtype),
        *_ring_barriers(plan, COMPUTING, arrays=1),
        *_staging(plan, dtype),
    ]
    bytes_per_head = kv_length * (d + e) * dtype.itemsize // inputs.group
    run = gpu.call(
        partial(_dq_kernel, plan),
        grid=program_grid(b * h, pl.cdiv(inputs.lengths[0], plan.tile.q), bytes_per_head),
        outputs=[jax.ShapeDtypeStruct(operands.q.shape, dtype)],
        scratch=scratch,
        warpgroups=COMPUTING + 1,
        interpret=interpret,
        name="attention_dq",
    )
    bounds = tile_bounds(problem, inputs, plan.tile.q, plan.tile.k, OVER_KEYS)
    *arrays, masks = operands
    [dq] = run(bounds, *arrays, *masks)
    return dq


def _run_dkv(
    problem: Problem, inputs: Inputs, operands: _Operands, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    plan = _plan(problem, inputs, operands, tiling.HOPPER_DKV, OVER_QUERIES, interpret)
    b, _, kv_heads, e = operands.v.shape
    _, q_length, _, d = operands.q.shape
    dtype = operands.q.dtype
    own_tiles = plan.tile.k // ROWS
    q_slots, dout_slots = plan.tile.stages
    scratch = [
        *_mask_scratch(plan, own_tiles),
        gpu.shared_memory((own_tiles, ROWS, d), dtype),  # k
        gpu.shared_memory((own_tiles, ROWS, e), dtype),  # v
        gpu.shared_memory((q_slots, plan.tile.q, d), dtype),
        gpu.shared_memory((dout_slots, plan.tile.q, e), dtype),
        gpu.shared_memory((q_slots, plan.tile.q), jnp.float32),  # lse
        gpu.shared_memory((dout_slots, plan.tile.q), jnp.float32),  # delta
        *_ring_barriers(plan, own_tiles, arrays=2),
        gpu.barriers(1, arrivals=COMPUTING),  # own_free
        gpu.barriers(1, arrivals=COMPUTING),  # done
        *_staging(plan, dtype),
    ]
    bytes_per_head = q_length * (d + e) * dtype.itemsize * inputs.group
    run = gpu.call(
        partial(_dkv_kernel, plan),
        grid=program_grid(b * kv_heads, pl.cdiv(inputs.lengths[1], plan.tile.k), bytes_per_head),
        outputs=[
            jax.ShapeDtypeStruct(operands.k.shape, dtype),
            jax.ShapeDtypeStruct(operands.v.shape, dtype),
        ],
        scratch=scratch,
        warpgroups=COMPUTING + 1,
        interpret=interpret,
        name="attention_dkv",
    )
    bounds = tile_bounds(problem, inputs, plan.tile.q, plan.tile.k, OVER_QUERIES)
    *arrays, masks = operands
    dk, dv = run(bounds, *arrays, *masks)
    return dk, dv


def _plan(problem, inputs, operands, table, over: int, interpret: bool) -> ScoresPlan:
    """`over`: the side whose tiles a program walks over."""
    tile = table[max(operands.q.shape[3], operands.v.shape[3])]
    padded_keys = over == OVER_KEYS and inputs.lengths[1] % tile.k != 0
    ranges = possible_ranges(problem, inputs, padded_keys=padded_keys, over=over)
    return ScoresPlan(
        problem,
        tile,
        rows_are_queries=over == OVER_KEYS,
        lengths=inputs.lengths,
        group=inputs.group,
        needs_mask=ranges != (FULL,),
        has_segments=inputs.has_segments,
        has_positions=inputs.has_positions,
        interpret=interpret,
    )


def _mask_scratch(plan: ScoresPlan, own: int) -> list:
    """Mask vectors of the program's own tiles, and of those in the first ring."""
    if not plan.mask_vectors:
        return []
    slots = plan.tile.stages[0]
    return [
        gpu.shared_memory((own, plan.mask_vectors, ROWS), jnp.int32),
        gpu.shared_memory((slots, plan.mask_vectors, plan.columns), jnp.int32),
    ]


def _ring_barriers(plan: ScoresPlan, own: int, arrays: int) -> list:
    """own_ready, then `ready` of both rings, then `free` of both.

    Every copy arrives once at its barrier: a slot takes `arrays` copies, and in the first ring one
    more for each mask vector; an own tile takes two arrays and the mask vectors.
    """
    first, second = plan.tile.stages
    return [
        gpu.barriers(own, arrivals=2 + plan.mask_vectors),
        gpu.barriers(max(first, 2), arrivals=arrays + plan.mask_vectors),
        gpu.barriers(max(second, 2), arrivals=arrays),
        gpu.barriers(first, arrivals=COMPUTING),
        gpu.barriers(second, arrivals=COMPUTING),
    ]


def _staging(plan: ScoresPlan, dtype) -> list:
    if not plan.interpret:
        return []
    return [gpu.shared_memory((COMPUTING, *plan.shape), dtype)] * 2
