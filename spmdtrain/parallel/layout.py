"""Where the layers of a stack lie when stages share them.

Layer chunk c of stage s holds the layers (c p + s) Lc ... + Lc, so that a stack [layers, ...] in pipeline layout is
[chunks v, stages p, layers per chunk Lc, ...], and one reshape leads there and back. Where v p does not divide the
number of layers, the last places are padding: copies of the last layer, computed like all and masked out.
"""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

AXES = ("chunk", "stage", "layer")  # logical axes of the three leading dims


@dataclass(frozen=True)
class Layout:
    """`chunks` v on each of `stages` p, `per_chunk` Lc places each, for `layers` layers."""

    chunks: int
    stages: int
    per_chunk: int
    layers: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.chunks, self.stages, self.per_chunk

    @property
    def places(self) -> int:
        return self.chunks * self.stages * self.per_chunk

    @property
    def padding(self) -> int:
        """Places without a layer; they cost as much as layers."""
        return self.places - self.layers

    def staged(self, stack: jax.Array) -> jax.Array:
        """[layers, ...] -> [v, p, Lc, ...]."""
        if self.padding:
            stack = jnp.concatenate([stack, jnp.repeat(stack[-1:], self.padding, axis=0)])
        return stack.reshape(*self.shape, *stack.shape[1:])

    def unstaged(self, stack: jax.Array) -> jax.Array:
        """[v, p, Lc, ...] -> [layers, ...], without the padding."""
        return stack.reshape(self.places, *stack.shape[3:])[: self.layers]

    def describe(self) -> dict[str, int]:
        """As a checkpoint records it."""
        return asdict(self)


def lay_out(layers: int, stages: int, chunks: int) -> Layout:
    """The layout with the fewest places."""
    return Layout(chunks, stages, -(-layers // (stages * chunks)), layers)
