"""The backward pass of attention on Mosaic GPU for Hopper: a kernel for dq, then one for dk and dv; every sum has one
order.

The dq kernel has a program per tile of queries and walks over keys. The other has one per tile of keys and walks over
the query heads that share them and over their queries; its scores are transposed, [keys, queries]. In both, each
computing warpgroup owns 64 rows of scores, which become the left sides of the next matmuls without leaving its
registers, and one warpgroup copies. Sums of dk and of dv for head dims above 128 fill the registers of a warpgroup
each: then one computes dk and the other dv of the same 64 keys, both from the scores. Letters as in problem.py; `at`
numbers a program's tile.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.hopper.programs import COMPUTING, grid_of, limits_of, program
from pallas_kernels.attention.hopper.scores import (
    ROWS,
    Ring,
    ScoresPlan,
    accumulate,
    copy_all,
    load_along,
    with_second,
)
from pallas_kernels.attention.plan import bounds, kept, padded, padded_places, parts, seen_keys
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.backends import mosaic as gpu

PADDED = COMPUTING * ROWS  # lengths are padded to a multiple: of whole tiles of both kernels


def _dq_kernel(plan: ScoresPlan, limits, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    of_queries, of_keys, refs = plan.sides(refs)
    dq_ref, *refs = refs
    places_s, refs = refs[: 2 * bool(of_keys)], refs[2 * bool(of_keys) :]
    q_s, dout_s, k_s, v_s, own_there, k_there, v_there, k_free, v_free, *staging = refs
    batch, head, at = program(q_ref.shape[2])
    at = jax.lax.axis_size("tile") - 1 - at  # with causal the longest first
    limits = limits_of(limits, batch, at)
    of_k, of_v = (
        Ring(slots, *both) for slots, both in zip(plan.tile.stages, ((k_there, k_free), (v_there, v_free)), strict=True)
    )
    warpgroup = jax.lax.axis_index("warpgroup")

    def queries(warpgroup):
        return pl.ds((at * COMPUTING + warpgroup) * ROWS, ROWS)

    @pl.when(warpgroup == COMPUTING)
    def _copy():
        gpu.set_max_registers(plan.tile.registers[0], action="decrease")
        shared, first, last = jax.lax.div(head, plan.group), limits[0], limits[3]
        for each in range(COMPUTING):
            for ref, own in ((q_ref, q_s), (dout_ref, dout_s)):
                gpu.copy_gmem_to_smem(ref.at[batch, queries(each), head], own.at[each], own_there.at[each])
            for number, ref in enumerate(of_queries):
                gpu.copy_gmem_to_smem(ref.at[batch, queries(each)], places_s[0].at[each, number], own_there.at[each])

        def copy(ref, into, places, step, slot, there):
            keys = pl.ds((first + step) * plan.tile.k, plan.tile.k)
            gpu.copy_gmem_to_smem(ref.at[batch, keys, shared], into.at[slot], there)
            for number, ref in enumerate(places):
                gpu.copy_gmem_to_smem(ref.at[batch, keys], places_s[1].at[slot, number], there)

        copy_all(last - first, (of_k, partial(copy, k_ref, k_s, of_keys)), (of_v, partial(copy, v_ref, v_s, [])))

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        gpu.set_max_registers(plan.tile.registers[1], action="increase")
        (first, *clear, last), own = (limits[part] for part in range(4)), (batch, head, queries(warpgroup))
        q, dout = q_s.at[warpgroup], dout_s.at[warpgroup]
        gpu.barrier_wait(own_there.at[warpgroup])
        lse, delta = (gpu.load_along(ref.at[own], 0) for ref in (lse_ref, delta_ref))
        row = (at * COMPUTING + warpgroup) * ROWS

        def visit(step, dq):
            j = first + step
            k_slot, v_slot = of_k.slot(step), of_v.slot(step)
            k, v = k_s.at[k_slot], v_s.at[v_slot]
            gpu.barrier_wait(of_k.arrival(step))

            def use(products):
                weights, slope = plan.weights(products, gpu.along(lse, plan.shape, 0))
                weights = weights if slope is None else weights * slope
                places = [each.at[index] for each, index in zip(places_s, (warpgroup, k_slot), strict=False)]
                return plan.masked(weights, clear, row, j, places)

            weights, dweights = with_second(
                plan,
                lambda into: gpu.wgmma(into, q, k.T),
                lambda: gpu.barrier_wait(of_v.arrival(step)),
                lambda into: gpu.wgmma(into, dout, v.T),
                use,
            )
            gpu.barrier_arrive(of_v.free.at[v_slot])
            dscores = (weights * (dweights - gpu.along(delta, plan.shape, 0))).astype(q.dtype)
            left = gpu.operand(dscores, staging[0].at[warpgroup] if staging else None, plan.interpret)
            [dq] = accumulate((dq,), lambda into: gpu.wgmma(into, left, k), plan.interpret)
            gpu.barrier_arrive(of_k.free.at[k_slot])
            return dq

        dq = jax.lax.fori_loop(0, last - first, visit, gpu.filled((ROWS, q.shape[1]), 0.0))
        q[...] = (dq * plan.problem.scale).astype(q.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(q, dq_ref.at[batch, queries(warpgroup), head])
        gpu.wait_smem_to_gmem(0)


def _dkv_kernel(plan: ScoresPlan, limits, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    of_keys, of_queries, refs = plan.sides(refs)
    dk_ref, dv_ref, *refs = refs
    places_s, refs = refs[: 2 * bool(of_keys)], refs[2 * bool(of_keys) :]
    k_s, v_s, q_s, dout_s, lse_s, delta_s, *refs = refs
    own_there, q_there, dout_there, q_free, dout_free, own_free, done, *staging = refs
    batch, shared, at = program(k_ref.shape[2])
    limits = limits_of(limits, batch, at)
    first, last = limits[0], limits[3]
    count = last - first
    total = count * plan.group
    of_q, of_dout = (
        Ring(slots, *both)
        for slots, both in zip(plan.tile.stages, ((q_there, q_free), (dout_there, dout_free)), strict=True)
    )
    tiles = plan.tile.k // ROWS
    warpgroup = jax.lax.axis_index("warpgroup")

    def keys(tile):
        return pl.ds((at * tiles + tile) * ROWS, ROWS)

    @pl.when(warpgroup == COMPUTING)
    def _copy():
        gpu.set_max_registers(plan.tile.registers[0], action="decrease")
        for each in range(tiles):
            for ref, own in ((k_ref, k_s), (v_ref, v_s)):
                gpu.copy_gmem_to_smem(ref.at[batch, keys(each), shared], own.at[each], own_there.at[each])
            for number, ref in enumerate(of_keys):
                gpu.copy_gmem_to_smem(ref.at[batch, keys(each)], places_s[0].at[each, number], own_there.at[each])

        def copy(ref, into, row_ref, row_into, places, step, slot, there):
            some = jax.lax.max(count, 1)
            head = shared * plan.group + jax.lax.div(step, some)
            queries = pl.ds((first + jax.lax.rem(step, some)) * plan.tile.q, plan.tile.q)
            gpu.copy_gmem_to_smem(ref.at[batch, queries, head], into.at[slot], there)
            gpu.copy_gmem_to_smem(row_ref.at[batch, head, queries], row_into.at[slot], there)
            for number, ref in enumerate(places):
                gpu.copy_gmem_to_smem(ref.at[batch, queries], places_s[1].at[slot, number], there)

        copy_all(
            total,
            (of_q, partial(copy, q_ref, q_s, lse_ref, lse_s, of_queries)),
            (of_dout, partial(copy, dout_ref, dout_s, delta_ref, delta_s, [])),
        )
        gpu.barrier_wait(done.at[0])
        for each in range(tiles):
            for ref, own in ((dk_ref, k_s), (dv_ref, v_s)):
                gpu.copy_smem_to_gmem(own.at[each], ref.at[batch, keys(each), shared])
        gpu.wait_smem_to_gmem(0)

    def compute(tile, of_keys: bool, of_values: bool):
        """dk, dv or both of the tile-th 64 keys."""
        gpu.set_max_registers(plan.tile.registers[1], action="increase")
        k, v = k_s.at[tile], v_s.at[tile]
        gpu.barrier_wait(own_there.at[tile])

        def visit(step, carry):
            i, *sums = carry
            q_slot, dout_slot = of_q.slot(step), of_dout.slot(step)
            q, dout = q_s.at[q_slot], dout_s.at[dout_slot]
            gpu.barrier_wait(of_q.arrival(step))

            def along(ref):
                return gpu.along(load_along(ref, 1), plan.shape, 1)

            def use(products):
                weights, slope = plan.weights(products, along(lse_s.at[q_slot]))
                if slope is not None and not of_values:
                    weights, slope = weights * slope, None
                places = [each.at[index] for each, index in zip(places_s, (tile, q_slot), strict=False)]
                weights = plan.masked(weights, (limits[1], limits[2]), (at * tiles + tile) * ROWS, i, places)
                return weights.astype(v.dtype), weights if slope is None else weights * slope

            (weights, sloped), dweights = with_second(
                plan,
                lambda into: gpu.wgmma(into, k, q.T),
                lambda: gpu.barrier_wait(of_dout.arrival(step)),
                (lambda into: gpu.wgmma(into, v, dout.T)) if of_keys else None,
                use,
            )

            def multiply(*into):
                into = list(into)
                if of_values:
                    left = gpu.operand(weights, staging[0].at[warpgroup] if staging else None, plan.interpret)
                    gpu.wgmma(into.pop(0), left, dout)
                if of_keys:
                    dscores = (sloped * (dweights - along(delta_s.at[dout_slot]))).astype(q.dtype)
                    left = gpu.operand(dscores, staging[1].at[warpgroup] if staging else None, plan.interpret)
                    gpu.wgmma(into.pop(0), left, q)

            sums = accumulate(tuple(sums), multiply, plan.interpret)
            gpu.barrier_arrive(of_dout.free.at[dout_slot])
            gpu.barrier_arrive(of_q.free.at[q_slot])
            return jnp.where(i + 1 == limits[3], limits[0], i + 1), *sums

        wanted = [(v, 1.0)] * of_values + [(k, plan.problem.scale)] * of_keys
        start = tuple(gpu.filled((ROWS, own.shape[1]), 0.0) for own, _ in wanted)
        _, *sums = jax.lax.fori_loop(0, total, visit, (first, *start))
        if tiles < COMPUTING:  # the other one reads k and v too
            gpu.barrier_arrive(own_free.at[0])
            gpu.barrier_wait(own_free.at[0])
        for each, (own, factor) in zip(sums, wanted, strict=True):
            own[...] = (each * factor).astype(own.dtype)
        gpu.commit_smem()
        gpu.barrier_arrive(done.at[0])  # the other warpgroup copies: where to would take registers here

    if tiles == COMPUTING:
        pl.when(warpgroup < COMPUTING)(lambda: compute(warpgroup, of_keys=True, of_values=True))
    else:
        pl.when(warpgroup == 0)(lambda: compute(0, of_keys=True, of_values=False))
        pl.when(warpgroup == 1)(lambda: compute(0, of_keys=False, of_values=True))


def backward(problem: Problem, inputs: Inputs, out, lse, dout, dlse, *, interpret: bool = False):
    """As `xla.backward`; no bias, so no gradient of it."""
    (b, t, h, d), (_, s, shared, _), e = inputs.q_bthd.shape, inputs.k_bskd.shape, inputs.v_bske.shape[3]
    dtype, blind = inputs.q_bthd.dtype, jnp.isneginf(lse)
    wide, deep = (-(-width // gpu.LANES) * gpu.LANES for width in (d, e))
    long, far = (-(-length // PADDED) * PADDED for length in (t, s))
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    lse, delta = (padded(jnp.moveaxis(jnp.where(blind, 0, x), 2, 1), (b, h, long)) for x in (lse * gpu.LOG2E, delta))
    own = inputs.segments is None and inputs.positions is None and t <= s  # every query sees a key: its own
    q, dout = (x if own else jnp.where(blind[..., None], 0, x) for x in (inputs.q_bthd, dout))
    seen = seen_keys(problem, inputs)
    q, dout = padded(q, (b, long, h, wide)), padded(dout, (b, long, h, deep))
    k = padded(kept(inputs.k_bskd, seen), (b, far, shared, wide))
    v = padded(kept(inputs.v_bske, seen), (b, far, shared, deep))
    places = padded_places(inputs, b, (long, far))
    given = q, k, v, dout, lse, delta, *(x for x in places if x is not None)

    def plan(table, by_query):
        tile = table[max(wide, deep)]
        masks = parts(problem, inputs, s % tile.k == 0 or not by_query, by_query) != (1,)
        given = inputs.segments is not None, inputs.positions is not None
        return ScoresPlan(problem, tile, by_query, (t, s), inputs.group, masks, given, interpret)

    def call(kernel, plan, heads, tiles, size, outputs, scratch, name):
        run = gpu.call(
            partial(kernel, plan),
            grid=grid_of(b * heads, tiles, size),
            outputs=[jax.ShapeDtypeStruct(x.shape, dtype) for x in outputs],
            scratch=scratch + [gpu.shared((COMPUTING, *plan.shape), dtype)] * (2 * interpret),
            warpgroups=COMPUTING + 1,
            interpret=interpret,
            name=name,
        )
        return run(bounds(problem, inputs, plan.tile.q, plan.tile.k, 2 if plan.by_query else 1), *given)

    def places_of(plan, own):
        """Shared memory for places of the program's own tiles, and of those that pass."""
        shapes = (own, plan.places, ROWS), (plan.tile.stages[0], plan.places, plan.columns)
        return [gpu.shared(shape, jnp.int32) for shape in shapes if plan.places]

    def rings(plan, own, arrays):
        """Barriers: of the program's own tiles, then of both rings "is there", then "is free"; a ring has `arrays`."""
        there = [
            gpu.barriers(max(slots, 2), arrays + more)
            for slots, more in zip(plan.tile.stages, (plan.places, 0), strict=True)
        ]
        free = [gpu.barriers(slots, COMPUTING) for slots in plan.tile.stages]
        return [gpu.barriers(own, 2 + plan.places), *there, *free]

    plan_q = plan(tiling.HOPPER_DQ, True)
    (k_slots, v_slots), block = plan_q.tile.stages, plan_q.tile.k
    scratch = [
        *places_of(plan_q, COMPUTING),
        *(gpu.shared((COMPUTING, ROWS, width), dtype) for width in (wide, deep)),
        gpu.shared((k_slots, block, wide), dtype),
        gpu.shared((v_slots, block, deep), dtype),
        *rings(plan_q, COMPUTING, 1),
    ]
    size = far * (wide + deep) * dtype.itemsize // inputs.group
    [dq] = call(_dq_kernel, plan_q, h, -(-t // plan_q.tile.q), size, [q], scratch, "attention_dq")

    plan_k = plan(tiling.HOPPER_DKV, False)
    (q_slots, dout_slots), block = plan_k.tile.stages, plan_k.tile.q
    scratch = [
        *places_of(plan_k, plan_k.tile.k // ROWS),
        *(gpu.shared((plan_k.tile.k // ROWS, ROWS, width), dtype) for width in (wide, deep)),
        gpu.shared((q_slots, block, wide), dtype),
        gpu.shared((dout_slots, block, deep), dtype),
        *(gpu.shared((slots, block), jnp.float32) for slots in plan_k.tile.stages),
        *rings(plan_k, plan_k.tile.k // ROWS, 2),
        *(gpu.barriers(1, COMPUTING) for _ in range(2)),
    ]
    size = long * (wide + deep) * dtype.itemsize * inputs.group
    dk, dv = call(_dkv_kernel, plan_k, shared, -(-s // plan_k.tile.k), size, [k, v], scratch, "attention_dkv")
    return dq[:, :t, :, :d], dk[:, :s, :, :d], dv[:, :s, :, :e], None
