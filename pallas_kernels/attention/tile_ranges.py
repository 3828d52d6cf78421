"""Finds the tiles that a program of a kernel visits, and which of them it must mask.

A program owns one tile of queries (or of keys) and walks over tiles of the other side in order,
from the first visible one to the last. Four bounds cut the walk into three ranges; the tiles
of the middle range need no mask, for every pair in them is visible.

    bounds    0          1          2          3
              |  masked  |   full   |  masked  |
    range          0          1          2
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.mask import block_mask
from pallas_kernels.attention.problem import Inputs, Problem

FULL = 1  # the range without a mask

OVER_QUERIES = 1  # dims of a block mask
OVER_KEYS = 2


def tile_bounds(
    problem: Problem, inputs: Inputs, block_q: int, block_k: int, over: int
) -> jax.Array:
    """Returns int32 [b or 1, tiles, 4]: four bounds of each tile's walk over the tiles of `over`.

    The middle range is the first run of full tiles; a later run is masked needlessly, but
    correctly.
    """
    visible, full = block_mask(problem, inputs, block_q, block_k)  # [., query tiles, key tiles]
    xp: Any = np if isinstance(visible, np.ndarray) else jnp
    visible, full = xp.broadcast_arrays(visible, full)
    visible, full = (xp.moveaxis(x, over, 2) for x in (visible, full))  # [., tiles, walked over]
    count = visible.shape[2]
    number = xp.arange(count)
    first = xp.min(xp.where(visible, number, count), -1)
    last = xp.max(xp.where(visible, number + 1, 0), -1)
    last = xp.maximum(first, last)  # an empty walk where nothing is visible
    full = full & visible
    full_from = xp.where(full.any(-1), xp.min(xp.where(full, number, count), -1), first)
    after_full = xp.min(xp.where((number >= full_from[..., None]) & ~full, number, count), -1)
    full_to = xp.minimum(after_full, last)
    return jnp.asarray(xp.stack([first, full_from, full_to, last], -1), jnp.int32)


def possible_ranges(
    problem: Problem, inputs: Inputs, *, padded_keys: bool, over: int
) -> tuple[int, ...]:
    """Returns the ranges that can hold a tile of this problem: code is made only for these.

    `padded_keys`: the last tile of keys extends beyond them.
    """
    if not inputs.mask_is_static or problem.left is not None:
        return 0, FULL, 2
    if problem.right is not None:  # a query's first keys are visible, a key's first queries hidden
        return (FULL, 2) if over == OVER_KEYS else (0, FULL, 2)
    return (FULL, 2) if padded_keys else (FULL,)


def walk(ranges: Sequence[int], bounds, body: Callable, carry):
    """Computes carry = body(masked)(tile, carry) for every tile of `ranges`, in order, as loops."""
    for each in ranges:
        step = body(each != FULL)
        carry = jax.lax.fori_loop(bounds[each], bounds[each + 1], step, carry)
    return carry
