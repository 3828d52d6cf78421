"""Where the layers of a stack lie when stages share them.

Layer chunk c of stage s holds the layers (c p + s) Lc ... + Lc, so that a stack [layers, ...] in pipeline layout is
[chunks v, stages p, layers per chunk Lc, ...], and one reshape leads there and back. Where v p does not divide the
number of layers, the last places are padding: copies of the last layer, computed like all and masked out. One stage
keeps its stack as it is.
"""

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Layout:
    """`chunks` v on each of `stages` p, `per_chunk` Lc places each, for `layers` layers."""

    chunks: int
    stages: int
    per_chunk: int
    layers: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dims of a stack."""
        return (self.chunks, self.stages, self.per_chunk) if self.stages > 1 else (self.layers,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical axes of these dims."""
        return ("chunk", "stage", "layer") if self.stages > 1 else ("layer",)

    @property
    def places(self) -> int:
        return self.chunks * self.stages * self.per_chunk

    @property
    def padding(self) -> int:
        """Places without a layer; they cost as much as layers."""
        return self.places - self.layers

    def staged(self, stack: jax.Array) -> jax.Array:
        """[layers, ...] -> `shape` [...]."""
        if self.padding:
            stack = jnp.concatenate([stack, jnp.repeat(stack[-1:], self.padding, axis=0)])
        return stack.reshape(*self.shape, *stack.shape[1:])

    def unstaged(self, stack: jax.Array) -> jax.Array:
        """`shape` [...] -> [layers, ...], without the padding."""
        return stack.reshape(self.places, *stack.shape[len(self.shape) :])[: self.layers]

    def describe(self) -> dict[str, int]:
        """As a checkpoint records it."""
        return asdict(self)


def lay_out(layers: int, stages: int, chunks: int) -> Layout:
    """The layout with the fewest places; on one stage there is one chunk."""
    chunks = chunks if stages > 1 else 1
    return Layout(chunks, stages, -(-layers // (stages * chunks)), layers)
