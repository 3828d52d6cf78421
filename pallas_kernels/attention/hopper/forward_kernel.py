"""Attention as FlashAttention-3 (arXiv:2407.08608) has it, on Mosaic GPU for Hopper: the forward pass.

Of three warpgroups one copies tiles into rings of shared memory and two compute, each for its own 64 queries: while one
takes its softmax the other has the matmul unit. Both meet the same tiles of keys, so that all three wait equally often.
No atomics. Lengths are padded to whole tiles and head dims to multiples of 64. Letters as in problem.py; `at` numbers a
program's tile, `warpgroup` 0 and 1 compute and 2 copies.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import tiling
from pallas_kernels.attention.hopper.masks import who_sees
from pallas_kernels.attention.hopper.programs import COMPUTING, grid_of, limits_of, program
from pallas_kernels.attention.plan import bounds, kept, padded, padded_places, parts, scores, seen_keys, visit
from pallas_kernels.attention.problem import Inputs, Problem
from pallas_kernels.attention.tiling import WarpgroupTile
from pallas_kernels.backends import mosaic as gpu

REGISTERS = {"copying": 24, "computing": 240}  # per thread: 128 (24 + 2 240) of 65536


@dataclass(frozen=True)
class _Plan:
    """What the kernel knows: the problem, its tile, how many tiles there are, the lengths before padding."""

    problem: Problem
    tile: WarpgroupTile
    counts: tuple[int, int]  # of query tiles, those of a program counted as one, and of key tiles
    lengths: tuple[int, int]
    group: int
    parts: tuple[int, ...]  # of `visit`, those that may have tiles
    split: bool  # there are segments
    placed: bool  # there are positions
    interpret: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of the scores of a computing warpgroup."""
        return self.tile.q, self.tile.k

    def seen(self, batch, query, key, places):
        """bool of `shape` for the tile whose first ones are number `query` and `key`; None: all see all.

        `places`: of queries and of keys, segments and then positions, those that there are.
        """
        first = query, key

        def load(pair):
            return [
                gpu.load_along(ref.at[batch, pl.ds(first[kind], self.shape[kind])], kind)
                for kind, ref in enumerate(pair)
            ]

        def number(kind):
            return gpu.numbers(self.shape[kind], kind) + first[kind]

        segments, positions = load(places[:2]) if self.split else None, None
        # what nothing uses would confuse the choice of layouts
        if self.problem.left is not None or self.problem.right is not None:
            own = () if self.placed else (number(0) + self.lengths[1] - self.lengths[0], number(1))
            positions = own or load(places[-2:])
        seen = who_sees(self.problem, self.shape, (0, 1), positions, segments)
        if self.lengths[1] == self.counts[1] * self.tile.k:
            return seen
        there = gpu.along(number(1), self.shape, 1) < self.lengths[1]
        return there if seen is None else there & seen


def _forward_kernel(plan: _Plan, limits, q_ref, k_ref, v_ref, *refs):
    given = plan.split + plan.placed
    places, refs = refs[: 2 * given], refs[2 * given :]
    out_ref, lse_ref, q_s, k_s, v_s, lse_s, q_ready, k_ready, v_ready, k_free, v_free, turn, *rest = refs
    out_s = q_s if q_ref.shape[3] == v_ref.shape[3] else rest.pop(0)
    staging = rest.pop(0) if plan.interpret else None
    batch, head, at = program(q_ref.shape[2])
    at = plan.counts[0] - 1 - at  # with causal the longest first
    limits = limits_of(limits, batch, at)
    warpgroup = jax.lax.axis_index("warpgroup")

    def queries(warpgroup):
        return pl.ds((at * COMPUTING + warpgroup) * plan.tile.q, plan.tile.q)

    @pl.when(warpgroup == COMPUTING)
    def _copy():
        gpu.set_max_registers(REGISTERS["copying"], action="decrease")
        for each in range(COMPUTING):
            gpu.copy_gmem_to_smem(q_ref.at[batch, queries(each), head], q_s.at[each], q_ready.at[each])
        first, last, shared = limits[0], limits[3], jax.lax.div(head, plan.group)

        @pl.loop(first, last + plan.tile.stages)
        def _(j):
            slot = jax.lax.rem(j, plan.tile.stages)
            again, more = (j - first >= plan.tile.stages) & (j - plan.tile.stages < last), j < last
            keys = pl.ds(j * plan.tile.k, plan.tile.k)
            pl.when(again)(lambda: gpu.barrier_wait(k_free.at[slot]))

            @pl.when(more)
            def _():
                gpu.copy_gmem_to_smem(k_ref.at[batch, keys, shared], k_s.at[slot], k_ready.at[slot])

            pl.when(again)(lambda: gpu.barrier_wait(v_free.at[slot]))

            @pl.when(more)
            def _():
                gpu.copy_gmem_to_smem(v_ref.at[batch, keys, shared], v_s.at[slot], v_ready.at[slot])

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        gpu.set_max_registers(REGISTERS["computing"], action="increase")
        gpu.barrier_wait(q_ready.at[warpgroup])
        query = (at * COMPUTING + warpgroup) * plan.tile.q
        pl.when(warpgroup == 1)(lambda: take_turns(turn))

        def body(masked):
            def step(j, carry):
                largest, total, out = carry
                slot = jax.lax.rem(j, plan.tile.stages)
                gpu.barrier_wait(k_ready.at[slot])
                products = gpu.product(
                    lambda into: gpu.wgmma(into, q_s.at[warpgroup], k_s.at[slot].T),
                    plan.shape,
                    then=lambda: take_turns(turn),
                )
                gpu.barrier_arrive(k_free.at[slot])
                x, _ = scores(plan.problem, products, gpu.LOG2E, gpu.tanh)
                if masked and (seen := plan.seen(batch, query, j * plan.tile.k, places)) is not None:
                    x = jnp.where(seen, x, -jnp.inf)
                new = jnp.maximum(largest, x.max(1))
                least = jnp.where(new == -jnp.inf, 0.0, new)
                weights, shrink = jnp.exp2(x - gpu.along(least, x.shape, 0)), jnp.exp2(largest - least)
                total = total * shrink + weights.sum(1)
                out = out * gpu.along(shrink, out.shape, 0)
                weights = weights.astype(v_s.dtype)
                new, total, out, weights = jax.lax.optimization_barrier((new, total, out, weights))
                gpu.barrier_arrive(turn)
                gpu.barrier_wait(v_ready.at[slot])
                gpu.barrier_wait(turn)
                left = gpu.operand(weights, staging and staging.at[warpgroup], plan.interpret)
                out = gpu.accumulate(out, lambda into: gpu.wgmma(into, left, v_s.at[slot]), plan.interpret)
                gpu.barrier_arrive(v_free.at[slot])
                return new, total, out

            return step

        rows, e = plan.tile.q, v_ref.shape[3]
        start = gpu.filled((rows,), -jnp.inf), gpu.filled((rows,), 0.0), gpu.filled((rows, e), 0.0)
        largest, total, out = visit(plan.parts, limits, body, start)
        pl.when(warpgroup == 0)(lambda: take_turns(turn))
        some = total > 0
        total = jnp.where(some, total, 1.0)
        out_s[warpgroup] = (out * gpu.along(1 / total, out.shape, 0)).astype(out_s.dtype)
        lse_s[warpgroup] = jnp.where(some, largest * gpu.LN2 + jnp.log(total), -jnp.inf)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(out_s.at[warpgroup], out_ref.at[batch, queries(warpgroup), head])
        gpu.copy_smem_to_gmem(lse_s.at[warpgroup], lse_ref.at[batch, head, queries(warpgroup)])
        gpu.wait_smem_to_gmem(0)


def take_turns(turn) -> None:
    """Waits for the other computing warpgroup to be at its next one."""
    gpu.barrier_arrive(turn)
    gpu.barrier_wait(turn)


def forward(problem: Problem, inputs: Inputs, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `xla.forward`."""
    (b, t, h, d), (_, s, shared, _), e = inputs.q_bthd.shape, inputs.k_bskd.shape, inputs.v_bske.shape[3]
    d, wide = (-(-width // gpu.LANES) * gpu.LANES for width in (d, e))
    tile = tiling.HOPPER_FORWARD[max(d, wide)]
    counts = -(-t // (COMPUTING * tile.q)), -(-s // tile.k)
    length, keys = counts[0] * COMPUTING * tile.q, counts[1] * tile.k
    q, k = padded(inputs.q_bthd, (b, length, h, d)), padded(inputs.k_bskd, (b, keys, shared, d))
    v = padded(kept(inputs.v_bske, seen_keys(problem, inputs)), (b, keys, shared, wide))
    places = [x for x in padded_places(inputs, b, (length, keys)) if x is not None]
    some, given = parts(problem, inputs, keys == s, True), [x is not None for x in (inputs.segments, inputs.positions)]
    plan = _Plan(problem, tile, counts, (t, s), inputs.group, some, *given, interpret)
    dtype = q.dtype
    run = gpu.call(
        partial(_forward_kernel, plan),
        grid=grid_of(b * h, counts[0], keys * (d + wide) * dtype.itemsize // plan.group),
        outputs=[
            jax.ShapeDtypeStruct((b, length, h, wide), dtype),
            jax.ShapeDtypeStruct((b, h, length), jnp.float32),
        ],
        scratch=[
            gpu.shared((COMPUTING, tile.q, d), dtype),
            gpu.shared((tile.stages, tile.k, d), dtype),
            gpu.shared((tile.stages, tile.k, wide), dtype),
            gpu.shared((COMPUTING, tile.q), jnp.float32),
            *(gpu.barriers(count) for count in (COMPUTING, tile.stages, tile.stages)),
            *(gpu.barriers(tile.stages, arrivals=COMPUTING) for _ in range(2)),
            gpu.barriers(1, arrivals=COMPUTING),
            *([gpu.shared((COMPUTING, tile.q, wide), dtype)] if wide != d else []),
            *([gpu.shared((COMPUTING, *plan.shape), dtype)] if interpret else []),
        ],
        warpgroups=COMPUTING + 1,
        interpret=interpret,
        name="attention_forward",
    )
    limits = bounds(problem, inputs, COMPUTING * tile.q, tile.k, 2)
    out, lse = run(limits, q, k, v, *places)
    return out[:, :t, :, :e], jnp.moveaxis(lse, 1, 2)[:, :t]
