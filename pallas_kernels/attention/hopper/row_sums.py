"""Sums the gradients of a shared array (heads.py) over its rows: the gradient of a bias.

Each computing warpgroup sums its own 64 rows from its registers, which cost no further read of the
gradients. XLA adds the sums of all programs, so their order is fixed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.hopper.programs import ROWS
from pallas_kernels.attention.hopper.scores import ScoresStatics
from pallas_kernels.backends import mosaic as gpu


class RowSums(NamedTuple):
    """The references to the sums of a program, in shared memory, and to their barrier."""

    sums: Any  # [results, tiles of 64 rows, d]
    turn: Any


def row_sums_scratch(statics: ScoresStatics, results: int, tiles: int, width: int) -> list:
    """Returns the scratch of `RowSums` for this many results; none if no array is shared."""
    if not statics.heads.joined:
        return []
    return [gpu.shared_memory((results, tiles, width), jnp.float32), gpu.barriers(1)]


def split_results(
    statics: ScoresStatics, refs: Sequence[Any], count: int
) -> tuple[list[Any], Any, list[Any]]:
    """Returns the references to `count` gradients, to their sums or None, and those after them."""
    if not statics.heads.joined:
        return list(refs[:count]), None, list(refs[count:])
    shared, sums, *rest = refs
    return [shared] * count, sums, rest


def sum_rows(
    scratch: RowSums, totals: Sequence[tuple[int, jax.Array]], tile, warpgroup, padded=None
) -> None:
    """Writes the sum of the rows of each gradient, (number, array [64, d]), to shared memory.

    Warpgroup 0 goes first: jax gives both the same memory to add what their warps hold.

    `padded`: (the number of the first row, the number of rows that exist), if some may not.
    """

    def real(total):
        if padded is None:
            return total
        first, count = padded
        is_real = gpu.broadcast(gpu.iota(ROWS, 0) + first, total.shape, 0) < count
        return jnp.where(is_real, total, 0.0)

    pl.when(warpgroup == 1)(lambda: gpu.barrier_wait(scratch.turn.at[0]))
    for number, total in totals:
        scratch.sums[number, tile] = real(total).sum(0)
    pl.when(warpgroup == 0)(lambda: gpu.barrier_arrive(scratch.turn.at[0]))
