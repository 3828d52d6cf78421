"""Computes scores of 64 rows by a tile of columns, in the registers of the backward kernels'
warpgroups.

A thread has 240 registers at most, and that decides the form of the code:

- one loop over all tiles, which masks where it must: the forward pass's three loops would keep the
  accumulators alive three times;
- a mask compares rows with columns: a difference of positions would take a register per score;
- with a softcap or masks, the second matmul may have to wait (`score_matmuls`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.hopper.heads import Heads
from pallas_kernels.attention.hopper.masks import pair_mask
from pallas_kernels.attention.hopper.programs import ROWS
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.tiling import GradientTile
from pallas_kernels.backends import mosaic as gpu


@dataclass(frozen=True)
class ScoresStatics:
    """The static arguments of a backward kernel."""

    problem: Problem
    tile: GradientTile
    rows_are_queries: bool  # and columns keys; otherwise scores are transposed
    lengths: tuple[int, int]  # (t, s) before padding
    heads: Heads
    needs_mask: bool  # in at least one tile
    has_segments: bool
    has_positions: bool
    interpret: bool

    @property
    def columns(self) -> int:
        return self.tile.k if self.rows_are_queries else self.tile.q

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a computing warpgroup's scores."""
        return ROWS, self.columns

    @property
    def mask_vectors(self) -> int:
        """The number of vectors that mask each side: its segment ids, its positions."""
        return self.has_segments + self.has_positions

    @property
    def axes(self) -> tuple[int, int]:
        """The dims of scores that count queries and keys."""
        return (0, 1) if self.rows_are_queries else (1, 0)

    def weights(self, products, lse) -> tuple[jax.Array, jax.Array | None]:
        """Returns (softmax, the softcap's derivative or None); lse is in units of log 2."""
        scores, slope = self.problem.scores(products, gpu.LOG2E, gpu.tanh)
        return jnp.exp2(scores - lse), slope

    def zero_hidden(self, weights, full, first_row, column_tile, masks):
        """Returns `weights` of a tile, 0 where hidden.

        The tile starts at row `first_row`; its columns are tile `column_tile`, which needs no mask
        from `full[0]` to before `full[1]`. `masks`: shared memory [mask_vectors, ROWS] of its rows
        and [mask_vectors, columns] of its columns; empty without any.
        """
        if not self.needs_mask:
            return weights

        def hide(weights):
            mask = self._mask((first_row, column_tile * self.columns), masks)
            return weights if mask is None else jnp.where(mask, weights, 0.0)

        is_partial = (column_tile < full[0]) | (column_tile >= full[1])
        return jax.lax.cond(is_partial, hide, lambda weights: weights, weights)

    def _mask(self, first, masks) -> jax.Array | None:
        """Returns bool `shape`: visible pairs of the tile at `first`, (row, column); None: all."""
        t, s = self.lengths
        q_axis, k_axis = self.axes

        def load(vector):
            of_queries = gpu.load_shared_vector(masks[q_axis].at[vector], q_axis)
            return of_queries, gpu.load_shared_vector(masks[k_axis].at[vector], k_axis)

        def numbers(axis):
            return gpu.iota(self.shape[axis], axis) + first[axis]

        segment_ids = None
        if self.has_segments:
            segment_ids = load(0)
        positions = None
        if self.problem.has_window and self.has_positions:
            positions = load(self.mask_vectors - 1)  # after segment ids
        elif self.problem.has_window:
            q_positions = numbers(q_axis) + (s - t)
            positions = q_positions, numbers(k_axis)
        mask = pair_mask(self.problem, self.shape, self.axes, positions, segment_ids)

        # Padding of keys. In rows it needs no mask: their sums are cut off at the end. If the call
        # is causal it needs none either, as padding comes after every query.
        has_padding = self.rows_are_queries and s % self.tile.k
        is_hidden_already = self.problem.right == 0 and not self.has_positions
        if not has_padding or is_hidden_already:
            return mask
        is_real = gpu.broadcast(numbers(1), self.shape, 1) < s
        return is_real if mask is None else is_real & mask


def score_matmuls(
    statics: ScoresStatics, first: Callable, wait: Callable, second: Callable | None, use: Callable
):
    """Returns (use(the first matmul's result), the second's result or None), each `statics.shape`.

    `first` and `second` issue matmuls onto the accumulator they get; `wait` waits for the operands
    of the second. The second matmul runs while `use` works on the first one's result; if there are
    too few registers for that, after it.
    """
    accumulator = gpu.ACC(statics.shape, jnp.float32)
    use_takes_more = statics.problem.softcap is not None or statics.mask_vectors

    def run_first(into):
        first(into)
        used = use(into[...])
        wait()
        return used

    if second is None:
        return pl.run_scoped(run_first, accumulator), None

    def run_both(into, other):
        first(into)
        wait()
        second(other)
        # The last matmul may still run: it is the second.
        return use(gpu.wgmma_accumulator_load(into, wait_n=1)), other[...]

    if use_takes_more and not statics.tile.overlap:
        used = pl.run_scoped(run_first, accumulator)
        return used, gpu.accumulate_from_zero(second, statics.shape)
    return pl.run_scoped(run_both, accumulator, gpu.ACC(statics.shape, jnp.float32))
