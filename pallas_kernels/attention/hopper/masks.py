"""The mask of a tile of scores, in registers."""

from functools import reduce
from operator import and_

import jax.numpy as jnp

from pallas_kernels.attention.problem import Problem
from pallas_kernels.backends import mosaic as gpu


def who_sees(problem: Problem, shape: tuple[int, int], axes: tuple[int, int], positions, segments):
    """bool of `shape`, the axes of queries and of keys in `axes`; None: all see all. As `problem.sees`.

    `positions`, `segments`: a vector of the queries and one of the keys, as `gpu.along` takes them; None where not
    needed. They are compared as they are: their difference would take a register for each score.
    """
    pairs = []
    if problem.right is not None:
        pairs.append((jnp.greater_equal, positions[0] + problem.right, positions[1]))
    if problem.left is not None:
        pairs.append((jnp.less_equal, positions[0] - problem.left, positions[1]))
    if segments is not None:
        pairs.append((jnp.equal, *segments))
    seen = [compare(gpu.along(of_q, shape, axes[0]), gpu.along(of_k, shape, axes[1])) for compare, of_q, of_k in pairs]
    return reduce(and_, seen) if seen else None
