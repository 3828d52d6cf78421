"""Runs a matmul on each device's own parts of its arrays, where XLA cannot partition it.

Each array gets a dim for the axes that do not split it. Every device along them then has its own
copy, and computes its own part of the product back to the stream, or of a gradient. XLA sums the
parts outside, as it does for its own matmuls.

b: sequences, t: tokens, e: width of the stream, f: the dims of heads or ffn, c: copies of a weight,
p: devices among which f is split.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of, locally
from spmdtrain.parallel.axes import axes_of_dim
from spmdtrain.parallel.copies import Dot


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The spec `wide` of h [b, t, *f], the wide array of a matmul."""

    wide: P

    @property
    def column(self) -> P:
        """The spec of a weight [c, e, *f]."""
        return P(self.token_axes or None, None, *self.wide[2:])

    @property
    def row(self) -> P:
        """The spec of a weight [c, *f, e]."""
        return P(self.token_axes or None, *self.wide[2:], None)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes whose devices have different tokens, and each its own copy of a weight."""
        return (*axes_of_dim(self.wide[0]), *axes_of_dim(self.wide[1]))

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """The axes that split f, whose devices have the same tokens of the stream."""
        return tuple(sorted(axes_of(self.wide) - set(self.token_axes)))

    @property
    def stream_parts(self) -> P:
        """The spec of copies, or parts, of the stream [p, b, t, e]."""
        return P(self.wide_axes or None, *self.wide[:2], None)

    def copy(self, weight: jax.Array) -> jax.Array:
        """Returns the copies [c, ...] of a weight; the backward pass sums their gradients."""
        return _copies(weight, self.token_axes)

    def from_stream(self, dot: Dot) -> Dot:
        """Returns `dot` of x [b, t, e] and weights [c, e, *f], which gives [b, t, *f]."""

        def local(x: jax.Array, weights: jax.Array) -> jax.Array:
            return dot(x[0], weights[0], 1)

        def multiply(x: jax.Array, weights: jax.Array, _: int) -> jax.Array:
            run = locally(local, (self.stream_parts, self.column), self.wide)
            return run(_copies(x, self.wide_axes), weights)

        return multiply

    def to_stream(self, dot: Dot) -> Dot:
        """Returns `dot` of h [b, t, *f] and weights [c, *f, e], which gives [b, t, e]."""

        def multiply(h: jax.Array, weights: jax.Array, contracted: int) -> jax.Array:
            def local(h: jax.Array, weights: jax.Array) -> jax.Array:
                return dot(h, weights[0], contracted)[None]

            run: Callable = locally(local, (self.wide, self.row), self.stream_parts)
            return jax.lax.reduce_sum(run(h, weights), (0,))

        return multiply


def _copies(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns x with a first dim that counts the devices along these axes of the mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return jnp.broadcast_to(x, (math.prod(sizes[axis] for axis in axes), *x.shape))
