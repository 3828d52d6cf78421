"""What the kernels of backward_kernels.py share: scores of 64 rows by a tile of columns, their masks, rings of tiles.

A thread has 240 registers at most, which decides the form of the code. A loop is one loop that masks where `clear` says
so: three would hold their sums in three places. Masks compare rows with columns: of differences there is one per score.
And `with_second` lets matmuls wait where a softcap or places take their registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.hopper.masks import who_sees
from pallas_kernels.attention.plan import scores
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.tiling import GradientTile
from pallas_kernels.backends import mosaic as gpu

ROWS = 64  # of scores, of a computing warpgroup


@dataclass(frozen=True)
class ScoresPlan:
    """What a kernel knows: the problem, its tile, the lengths before padding.

    `by_query`: rows of scores are queries and columns keys, else the other way.
    """

    problem: Problem
    tile: GradientTile
    by_query: bool
    lengths: tuple[int, int]
    group: int
    masks: bool  # some tile needs it
    given: tuple[bool, bool]  # whether there are segments, positions
    interpret: bool

    @property
    def columns(self) -> int:
        return self.tile.k if self.by_query else self.tile.q

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.columns

    @property
    def places(self) -> int:
        return sum(self.given)

    def sides(self, refs):
        """(places of rows, places of columns, the references behind them)"""
        count = 2 * self.places
        queries, keys = refs[0:count:2], refs[1:count:2]
        return (queries, keys, refs[count:]) if self.by_query else (keys, queries, refs[count:])

    def weights(self, products, lse) -> tuple[jax.Array, jax.Array | None]:
        """(softmax, slope of the softcap or None) given q k^T and what comes off the scores for exp2."""
        x, slope = scores(self.problem, products, gpu.LOG2E, gpu.tanh)
        return jnp.exp2(x - lse), slope

    def masked(self, weights, clear, row, column, places):
        """`weights` of the tile that begins at row number `row`, and whose columns are tile `column`, 0 where not seen.

        `clear`: tiles from the first to before the second need no mask. `places`: shared memory with those of its rows
        and of its columns, [places, ROWS or columns].
        """
        if not self.masks:
            return weights

        def mask(weights):
            seen = self._seen((row, column * self.columns), places)
            return weights if seen is None else jnp.where(seen, weights, 0.0)

        return jax.lax.cond((column < clear[0]) | (column >= clear[1]), mask, lambda weights: weights, weights)

    def _seen(self, first, places):
        """bool [rows, columns]; None: all."""
        axes, segments, positions = (0, 1) if self.by_query else (1, 0), None, None

        def load(number):
            return [load_along(places[axis].at[number], axis) for axis in axes]

        def numbers(axis):
            return gpu.numbers(self.shape[axis], axis) + first[axis]

        if self.given[0]:
            segments = load(0)
        if self.problem.left is not None or self.problem.right is not None:
            shift = self.lengths[1] - self.lengths[0]
            positions = load(self.places - 1) if self.given[1] else (numbers(axes[0]) + shift, numbers(axes[1]))
        seen = who_sees(self.problem, self.shape, axes, positions, segments)
        padded_keys = self.by_query and self.lengths[1] % self.tile.k  # not by_query: rows, whose sums are cut off
        if not padded_keys or (self.problem.right == 0 and not self.given[1]):  # they come after all queries
            return seen
        there = gpu.along(numbers(1), self.shape, 1) < self.lengths[1]
        return there if seen is None else there & seen


def load_along(ref, dim: int) -> jax.Array:
    """A vector in shared memory, as `gpu.along(..., dim)` takes it."""
    return gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(1 - dim))


@dataclass(frozen=True)
class Ring:
    """Slots of shared memory that tiles pass through in turn, and barriers: a tile is there, its slot is free."""

    slots: int
    there: jax.Array
    free: jax.Array

    def slot(self, step):
        return jax.lax.rem(step, self.slots)

    def arrival(self, step):
        """The barrier that the tile of this step is there; two for one slot, or its address takes a register."""
        return self.there.at[jax.lax.rem(step, max(self.slots, 2))]


def copy_all(total, *rings: tuple[Ring, Callable]) -> None:
    """`copy(step, slot, barrier)` of each ring for `total` steps, each when its slot is free; at the end all are."""

    @pl.loop(0, total + max(ring.slots for ring, _ in rings))
    def _(step):
        for ring, copy in rings:
            slot = ring.slot(step)
            again = (step >= ring.slots) & (step < total + ring.slots)
            pl.when(again)(partial(gpu.barrier_wait, ring.free.at[slot]))
            pl.when(step < total)(partial(copy, step, slot, ring.arrival(step)))


def with_second(plan: ScoresPlan, first: Callable, wait: Callable, second: Callable | None, use: Callable):
    """(use(what `first(accumulator)` multiplies), what `second` does or None), each `plan.shape`.

    The second runs while `use` does, where registers last for it.
    """
    shape, more = plan.shape, plan.problem.softcap is not None or plan.places

    def alone(into):
        first(into)
        used = use(into[...])
        wait()
        return used

    def both(into, other):
        first(into)
        wait()
        second(other)
        return use(gpu.wgmma_accumulator_load(into, wait_n=1)), other[...]

    if second is None or (more and not plan.tile.overlap):
        used = pl.run_scoped(alone, gpu.ACC(shape, jnp.float32))
        return used, None if second is None else gpu.product(second, shape)
    return pl.run_scoped(both, gpu.ACC(shape, jnp.float32), gpu.ACC(shape, jnp.float32))


def accumulate(starts: tuple[jax.Array, ...], multiply: Callable, interpret: bool) -> tuple[jax.Array, ...]:
    """starts + what `multiply(*accumulators)` gives."""
    if interpret:

        def run(*into):
            multiply(*into)
            return tuple(each[...] for each in into)

        sums = pl.run_scoped(run, *(gpu.ACC(start.shape, jnp.float32) for start in starts))
        return tuple(start + total for start, total in zip(starts, sums, strict=True))
    return pl.run_state(lambda into: multiply(*into))(tuple(gpu.ACC.init(start) for start in starts))
