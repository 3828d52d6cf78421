"""The forward pass on Hopper: one kernel, after FlashAttention-3 (arXiv:2407.08608).

A program owns COMPUTING tiles of 64 queries of one head. Warpgroups 0 and 1 compute, one tile each;
warpgroup 2 copies. It brings the queries once, then tiles of keys and of values into two rings of
shared memory, in the order in which both computing warpgroups use them.

Barriers, by who waits for what:

    q_ready[w]       warpgroup w: its queries have been copied
    k_ready[slot]    both computing: a tile of keys is in this slot (v_ready: of values)
    k_free[slot]     the copying one: both have read this slot (v_free: of values)
    turn             both computing: the other one is at its next turn

A step of a computing warpgroup has two turns: matmuls (weights x values of this tile, queries x
keys of the next), then softmax. Warpgroup 1 starts one turn late, so that one takes its softmax
while the other has the matmul unit. Both walk over the same tiles, hence wait equally often.

No atomics. Lengths are padded to whole tiles and head dims to multiples of 64. Letters as in
problem.py; `at` numbers the program's tile and `j` the tiles of keys.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.hopper.heads import Heads, heads_of, shared_array
from pallas_kernels.attention.hopper.masks import pair_mask
from pallas_kernels.attention.hopper.programs import (
    COMPUTING,
    Program,
    bounds_of,
    program_grid,
    this_program,
)
from pallas_kernels.attention.mask import visible_keys, zero_hidden
from pallas_kernels.attention.operands import (
    MaskOperands,
    pad_mask_operands,
    pad_to,
    round_up,
    split_mask_operands,
)
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.attention.tile_ranges import OVER_KEYS, possible_ranges, tile_bounds, walk
from pallas_kernels.attention.tiling import WarpgroupTile
from pallas_kernels.backends import mosaic as gpu

# Registers of a thread. 128 threads copy and 2 x 128 compute: 128 x (24 + 2 x 240) of 65536.
REGISTERS_COPYING = 24
REGISTERS_COMPUTING = 240


@dataclass(frozen=True)
class _Statics:
    """The static arguments of the kernel."""

    problem: Problem
    tile: WarpgroupTile
    counts: tuple[int, int]  # tiles of queries, COMPUTING of which count as one; tiles of keys
    lengths: tuple[int, int]  # before padding
    heads: Heads
    ranges: tuple[int, ...]  # of tile_ranges.walk
    has_segments: bool
    has_positions: bool
    interpret: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a computing warpgroup's scores."""
        return self.tile.q, self.tile.k

    def mask(self, batch, first_query, first_key, masks: MaskOperands) -> jax.Array | None:
        """Returns bool `shape`: visible pairs of the tile that starts here; None: all are."""
        t, s = self.lengths
        rows, columns = self.shape

        def load(q_ref, k_ref):
            of_queries = q_ref.at[batch, pl.ds(first_query, rows)]
            of_keys = k_ref.at[batch, pl.ds(first_key, columns)]
            return gpu.load_global_vector(of_queries, 0), gpu.load_global_vector(of_keys, 1)

        segment_ids = None
        if self.has_segments:
            segment_ids = load(masks.q_segment_ids, masks.kv_segment_ids)
        # Only what is used may be made: the rest would confuse the choice of layouts.
        positions = None
        if self.problem.has_window and self.has_positions:
            positions = load(masks.q_positions, masks.kv_positions)
        elif self.problem.has_window:
            q_positions = gpu.iota(rows, 0) + first_query + s - t
            positions = q_positions, gpu.iota(columns, 1) + first_key
        mask = pair_mask(self.problem, self.shape, (0, 1), positions, segment_ids)
        if s == self.counts[1] * self.tile.k:
            return mask
        is_real = gpu.broadcast(gpu.iota(columns, 1) + first_key, self.shape, 1) < s
        return is_real if mask is None else is_real & mask


class _Memory(NamedTuple):
    """The references to global memory."""

    bounds: Any  # of this program's tile
    q: Any
    k: Any
    v: Any
    masks: MaskOperands
    out: Any
    lse: Any


class _Scratch(NamedTuple):
    """The references to the shared memory and barriers of a program; see `_scratch`."""

    q: Any
    k: Any
    v: Any
    lse: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    out: Any  # that of q if it has the same shape: queries are read before
    staging: Any  # None unless interpreted


def _forward_kernel(statics: _Statics, bounds_ref, *refs):
    q_ref, k_ref, v_ref, refs = statics.heads.split_refs(refs)
    masks, refs = split_mask_operands(refs, statics.has_segments, statics.has_positions)
    out_ref, lse_ref, q_s, k_s, v_s, lse_s, *refs = refs
    q_ready, k_ready, v_ready, k_free, v_free, turn, *refs = refs
    out_s = q_s if q_ref.shape[3] == v_ref.shape[3] else refs.pop(0)
    staging = refs.pop(0) if statics.interpret else None

    program = this_program(statics.heads.queries)
    # The last tile first: if the call is causal it takes longest.
    program = program._replace(tile=statics.counts[0] - 1 - program.tile)
    memory = _Memory(
        bounds=bounds_of(bounds_ref, program),
        q=q_ref,
        k=k_ref,
        v=v_ref,
        masks=masks,
        out=out_ref,
        lse=lse_ref,
    )
    scratch = _Scratch(
        q=q_s,
        k=k_s,
        v=v_s,
        lse=lse_s,
        q_ready=q_ready,
        k_ready=k_ready,
        v_ready=v_ready,
        k_free=k_free,
        v_free=v_free,
        turn=turn,
        out=out_s,
        staging=staging,
    )
    warpgroup = jax.lax.axis_index("warpgroup")
    pl.when(warpgroup == COMPUTING)(partial(_copy, statics, memory, scratch, program))
    pl.when(warpgroup < COMPUTING)(partial(_compute, statics, memory, scratch, program, warpgroup))


def _own_queries(statics: _Statics, program: Program, warpgroup):
    """Returns the slice of the query dim that a computing warpgroup owns."""
    return pl.ds((program.tile * COMPUTING + warpgroup) * statics.tile.q, statics.tile.q)


def _copy(statics: _Statics, memory: _Memory, scratch: _Scratch, program: Program):
    """Runs the copying warpgroup."""
    batch, head, _ = program
    heads = statics.heads
    q_slot = heads.query_slot(head)
    kv_head = heads.of_keys(head)
    k_slot = heads.key_slot(kv_head)
    v_slot = heads.value_slot(kv_head)
    gpu.set_max_registers(REGISTERS_COPYING, action="decrease")
    for warpgroup in range(COMPUTING):
        queries = _own_queries(statics, program, warpgroup)
        gpu.copy_gmem_to_smem(
            memory.q.at[batch, queries, q_slot],
            scratch.q.at[warpgroup],
            scratch.q_ready.at[warpgroup],
        )
    first = memory.bounds[0]
    last = memory.bounds[3]
    stages = statics.tile.stages

    # The last `stages` turns copy nothing. They wait for the slots to be freed: every arrival at a
    # barrier must be waited for before the program ends.
    @pl.loop(first, last + stages)
    def _(j):
        slot = jax.lax.rem(j, stages)
        is_reused = (j - first >= stages) & (j - stages < last)
        has_tile = j < last
        keys = pl.ds(j * statics.tile.k, statics.tile.k)
        pl.when(is_reused)(lambda: gpu.barrier_wait(scratch.k_free.at[slot]))

        @pl.when(has_tile)
        def _():
            gpu.copy_gmem_to_smem(
                memory.k.at[batch, keys, k_slot], scratch.k.at[slot], scratch.k_ready.at[slot]
            )

        pl.when(is_reused)(lambda: gpu.barrier_wait(scratch.v_free.at[slot]))

        @pl.when(has_tile)
        def _():
            gpu.copy_gmem_to_smem(
                memory.v.at[batch, keys, v_slot], scratch.v.at[slot], scratch.v_ready.at[slot]
            )


def _compute(statics: _Statics, memory: _Memory, scratch: _Scratch, program: Program, warpgroup):
    """Runs a computing warpgroup: the online softmax over tiles of keys."""
    batch, head, at = program
    gpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
    gpu.barrier_wait(scratch.q_ready.at[warpgroup])
    first_query = (at * COMPUTING + warpgroup) * statics.tile.q
    turn = scratch.turn
    v_ready = scratch.v_ready
    pl.when(warpgroup == 1)(lambda: _take_turns(turn))  # it stays one turn late from here on

    def body(masked):
        def step(j, carry):
            largest, total, out = carry
            slot = jax.lax.rem(j, statics.tile.stages)
            gpu.barrier_wait(scratch.k_ready.at[slot])
            products = gpu.accumulate_from_zero(
                lambda into: gpu.wgmma(into, scratch.q.at[warpgroup], scratch.k.at[slot].T),
                statics.shape,
                meanwhile=lambda: _take_turns(turn),
            )
            gpu.barrier_arrive(scratch.k_free.at[slot])
            scores, _ = statics.problem.scores(products, gpu.LOG2E, gpu.tanh)
            if masked:
                mask = statics.mask(batch, first_query, j * statics.tile.k, memory.masks)
                if mask is not None:
                    scores = jnp.where(mask, scores, -jnp.inf)
            new_largest = jnp.maximum(largest, scores.max(1))
            # A query without a visible key so far: -inf - -inf would be NaN.
            offset = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
            weights = jnp.exp2(scores - gpu.broadcast(offset, scores.shape, 0))
            rescale = jnp.exp2(largest - offset)
            total = total * rescale + weights.sum(1)
            out = out * gpu.broadcast(rescale, out.shape, 0)
            weights = weights.astype(scratch.v.dtype)
            # All of the softmax belongs to this turn: the compiler must not move it into the next.
            new_largest, total, out, weights = jax.lax.optimization_barrier(
                (new_largest, total, out, weights)
            )
            gpu.barrier_arrive(turn)
            gpu.barrier_wait(v_ready.at[slot])
            gpu.barrier_wait(turn)
            staging = None if scratch.staging is None else scratch.staging.at[warpgroup]
            left = gpu.left_operand(weights, staging, statics.interpret)
            [out] = gpu.accumulate_onto(
                (out,), lambda into: gpu.wgmma(into, left, scratch.v.at[slot]), statics.interpret
            )
            gpu.barrier_arrive(scratch.v_free.at[slot])
            return new_largest, total, out

        return step

    rows = statics.tile.q
    start = (
        gpu.full((rows,), -jnp.inf),
        gpu.full((rows,), 0.0),
        gpu.full((rows, memory.v.shape[3]), 0.0),
    )
    largest, total, out = walk(statics.ranges, memory.bounds, body, start)
    pl.when(warpgroup == 0)(lambda: _take_turns(turn))  # lets warpgroup 1 make its last turn
    has_key = total > 0
    total = jnp.where(has_key, total, 1.0)
    out = out * gpu.broadcast(1 / total, out.shape, 0)
    scratch.out[warpgroup] = out.astype(scratch.out.dtype)
    lse = jnp.where(has_key, largest * gpu.LN2 + jnp.log(total), -jnp.inf)
    scratch.lse[warpgroup] = lse
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(
        scratch.out.at[warpgroup],
        memory.out.at[batch, _own_queries(statics, program, warpgroup), head],
    )
    gpu.copy_smem_to_gmem(
        scratch.lse.at[warpgroup],
        memory.lse.at[batch, head, _own_queries(statics, program, warpgroup)],
    )
    gpu.wait_smem_to_gmem(0)


def _take_turns(turn) -> None:
    """Ends this warpgroup's turn and waits for the other computing warpgroup to end its own."""
    gpu.barrier_arrive(turn)
    gpu.barrier_wait(turn)


def forward(
    problem: Problem,
    inputs: Inputs,
    *,
    joined_btknd: jax.Array | None = None,
    interpret: bool = False,
    variant: str = "",
) -> tuple[jax.Array, jax.Array]:
    """Does what `xla.forward` does; `variant` is one of tiling.HOPPER_VARIANTS.

    `joined_btknd`: the array of which q, k and v are parts, to read them from it in place.
    """
    b, t, h, d = inputs.q_bthd.shape
    _, s, kv_heads, e = inputs.v_bske.shape
    dtype = inputs.q_bthd.dtype
    d_padded = round_up(d, gpu.SWIZZLE_ELEMENTS)
    e_padded = round_up(e, gpu.SWIZZLE_ELEMENTS)
    tile = tiling.hopper_tables(variant).forward[max(d_padded, e_padded)]
    own_queries = COMPUTING * tile.q
    counts = (pl.cdiv(t, own_queries), pl.cdiv(s, tile.k))
    q_length = counts[0] * own_queries
    kv_length = counts[1] * tile.k
    if joined_btknd is None:
        q = pad_to(inputs.q_bthd, (b, q_length, h, d_padded))
        k = pad_to(inputs.k_bskd, (b, kv_length, kv_heads, d_padded))
        v = zero_hidden(inputs.v_bske, visible_keys(problem, inputs))
        arrays = (q, k, pad_to(v, (b, kv_length, kv_heads, e_padded)))
    else:  # every query sees its own key: none is hidden
        arrays = (shared_array(joined_btknd, max(q_length, kv_length), d_padded),)
    masks = pad_mask_operands(inputs, q_length, kv_length)
    statics = _Statics(
        problem,
        tile,
        counts,
        lengths=(t, s),
        heads=heads_of(inputs, joined_btknd is not None),
        ranges=possible_ranges(problem, inputs, padded_keys=kv_length != s, over=OVER_KEYS),
        has_segments=inputs.has_segments,
        has_positions=inputs.has_positions,
        interpret=interpret,
    )
    bytes_per_head = kv_length * (d_padded + e_padded) * dtype.itemsize // inputs.group
    run = gpu.call(
        partial(_forward_kernel, statics),
        grid=program_grid(b * h, counts[0], bytes_per_head),
        outputs=[
            jax.ShapeDtypeStruct((b, q_length, h, e_padded), dtype),
            jax.ShapeDtypeStruct((b, h, q_length), jnp.float32),
        ],
        scratch=_scratch(statics, d_padded, e_padded, dtype),
        warpgroups=COMPUTING + 1,
        interpret=interpret,
        name="attention_forward",
    )
    bounds = tile_bounds(problem, inputs, own_queries, tile.k, OVER_KEYS)
    out, lse = run(bounds, *arrays, *(x for x in masks if x is not None))
    return out[:, :t, :, :e], jnp.moveaxis(lse, 1, 2)[:, :t]


def _scratch(statics: _Statics, d: int, e: int, dtype) -> list:
    """Returns scratch memory in the order `_forward_kernel` takes it; head dims padded."""
    tile = statics.tile
    scratch = [
        gpu.shared_memory((COMPUTING, tile.q, d), dtype),  # q
        gpu.shared_memory((tile.stages, tile.k, d), dtype),  # k
        gpu.shared_memory((tile.stages, tile.k, e), dtype),  # v
        gpu.shared_memory((COMPUTING, tile.q), jnp.float32),  # lse
        gpu.barriers(COMPUTING),  # q_ready
        gpu.barriers(tile.stages),  # k_ready
        gpu.barriers(tile.stages),  # v_ready
        gpu.barriers(tile.stages, arrivals=COMPUTING),  # k_free
        gpu.barriers(tile.stages, arrivals=COMPUTING),  # v_free
        gpu.barriers(1, arrivals=COMPUTING),  # turn
    ]
    if e != d:
        scratch.append(gpu.shared_memory((COMPUTING, tile.q, e), dtype))  # out
    if statics.interpret:
        scratch.append(gpu.shared_memory((COMPUTING, *statics.shape), dtype))  # staging
    return scratch
