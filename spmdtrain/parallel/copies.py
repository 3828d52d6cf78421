"""Gives a matmul's weight a copy for each part of the tokens, so that the parts of its gradient are
summed once a step.

An axis like `context` splits the tokens inside a sequence, and each of its devices computes a part
of every weight's gradient. The axis is left to XLA, which would sum the parts as soon as it has
them: in every layer of every microbatch. So the weight gets a dim that counts the parts. Each
device along the axis holds the copy that multiplies its own tokens, which takes no more memory than
the shared weight would. The parts of the gradient then stay separate until the end of the step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.parallel.axes import Rules, axes_of_dim, drop_axes
from spmdtrain.parallel.reduce import Reduction
from spmdtrain.parallel.regions import MANUAL_AXES

# (x, weight, number of dims that it contracts), as jnp.tensordot; a weight may bring its scales
Dot = Callable[[jax.Array, Any, int], jax.Array]


@dataclass(frozen=True)
class Copies:
    """The copies of one weight, inside the region of the training step.

    axes: the mesh axes that split the tokens and not the weight, major first; () for no copies.
    ways: devices along them.
    dim: the dim that counts copies. It follows the dims that stack layers.
    """

    axes: tuple[str, ...] = ()
    ways: int = 1
    dim: int = 0

    def add(self, x: jax.Array, spec: P) -> jax.Array:
        """Returns the copies of the weight x, whose spec is `spec`."""
        if not self.axes:
            return x
        shape = (*x.shape[: self.dim], self.ways, *x.shape[self.dim :])
        copies = jnp.broadcast_to(jnp.expand_dims(x, self.dim), shape)
        return jax.lax.with_sharding_constraint(copies, drop_axes(MANUAL_AXES, self.spec(spec)))

    def map(self, function: Callable[[jax.Array], jax.Array], copies: jax.Array) -> jax.Array:
        """Returns `function` of each copy."""
        if not self.axes:
            return function(copies)
        return jax.vmap(function, self.dim, self.dim)(copies)

    def sum(self, copies: jax.Array, spec: P) -> jax.Array:
        """Returns the sum of the copies, with the spec `spec`."""
        if not self.axes:
            return copies
        return jax.lax.with_sharding_constraint(copies.sum(self.dim), drop_axes(MANUAL_AXES, spec))

    def spec(self, spec: P) -> P:
        """Returns the spec of a weight's copies, given the weight's `spec`."""
        if not self.axes:
            return spec
        return P(*spec[: self.dim], self.axes, *spec[self.dim :])

    def reduction(self, reduction: Reduction) -> Reduction:
        """Returns the `reduction` of a gradient, applied to all its copies together."""
        if not self.axes:
            return reduction
        scatter = tuple((axis, dim + (dim >= self.dim)) for axis, dim in reduction.scatter)
        return replace(reduction, scatter=scatter)


def copies_of(rules: Rules, spec: P, stacked: int = 0) -> Copies:
    """Returns the copies of a matmul's weight with this `spec`.

    Its first `stacked` dims count layers. There are no copies if a mesh axis
    that splits tokens splits the weight too.
    """
    _, over_time = rules.activation_spec(("batch", "time"), (0, 0), drop=MANUAL_AXES)
    axes = axes_of_dim(over_time)
    if not axes or axes_of(spec) & set(axes):
        return Copies()
    return Copies(axes, math.prod(rules.sizes[axis] for axis in axes), stacked)


def multiply_copies(
    x: jax.Array, copies: Any, contracted: int, dot: Dot = jnp.tensordot
) -> jax.Array:
    """Returns the matmul [b, t, *o] of x [b, t, *i] and the copies [c, *i, *o] of a weight.

    Each copy multiplies its own c-th part of the tokens, by `dot`. `contracted`: the number of
    dims i. Scales that come with a weight have the dim c too.
    """
    batch, tokens = x.shape[:2]
    count = jax.tree.leaves(copies)[0].shape[0]
    x = x.reshape(batch, count, tokens // count, *x.shape[2:])
    y = jax.vmap(lambda part, weight: dot(part, weight, contracted), (1, 0))(x, copies)
    return jnp.moveaxis(y, 0, 1).reshape(batch, tokens, *y.shape[3:])  # y: [c, b, t / c, *o]
