"""Makes the mask of a tile of scores, in registers."""

from functools import reduce
from operator import and_

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Problem
from pallas_kernels.backends import mosaic as gpu


def pair_mask(
    problem: Problem,
    shape: tuple[int, int],
    axes: tuple[int, int],
    positions: tuple[jax.Array, jax.Array] | None,
    segment_ids: tuple[jax.Array, jax.Array] | None,
) -> jax.Array | None:
    """Returns bool `shape`, like `mask.pair_mask`: which pairs are visible; None: all.

    `axes`: the dim of `shape` that counts queries, then the one that counts keys. `positions` and
    `segment_ids` are vectors of the queries and of the keys, each belonging to its dim; positions
    are needed if the problem has a window.

    Rows are compared with columns. A difference of positions would take a register per score.
    """
    assert positions is not None or not problem.has_window, "a window compares positions"
    comparisons = []
    if positions is not None:
        q_positions, kv_positions = positions
        if problem.right is not None:
            comparisons.append((jnp.greater_equal, q_positions + problem.right, kv_positions))
        if problem.left is not None:
            comparisons.append((jnp.less_equal, q_positions - problem.left, kv_positions))
    if segment_ids is not None:
        comparisons.append((jnp.equal, *segment_ids))
    q_axis, k_axis = axes
    masks = [
        compare(gpu.broadcast(of_q, shape, q_axis), gpu.broadcast(of_k, shape, k_axis))
        for compare, of_q, of_k in comparisons
    ]
    return reduce(and_, masks) if masks else None
