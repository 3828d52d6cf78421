"""Assigns the layers of a stack to pipeline stages, and gives the shape in which it is stored.

With v chunks on each of p stages and Lc layers in a chunk, chunk c of stage s holds the layers
(c p + s) Lc up to (c p + s + 1) Lc. A stack [layers, ...] in pipeline layout is therefore
[chunks v, stages p, layers per chunk Lc, ...], and one reshape leads there and back.

If v p does not divide the number of layers, the last places are padding: copies of the last layer,
which are computed like all others and masked out. A single stage keeps its stack as it is.
"""

from dataclasses import asdict, dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Stack = TypeVar("Stack", jax.Array, np.ndarray)


@dataclass(frozen=True)
class StageLayout:
    """The layout of `layers` layers in `chunks` v on each of `stages` p, with `per_chunk` Lc places
    in each.
    """

    chunks: int
    stages: int
    per_chunk: int
    layers: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dims of a stack: (v, p, Lc), or (layers,) on one stage."""
        if self.stages > 1:
            return (self.chunks, self.stages, self.per_chunk)
        return (self.layers,)

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical axes of the leading dims."""
        return ("chunk", "stage", "layer") if self.stages > 1 else ("layer",)

    @property
    def places(self) -> int:
        """The number of layers that fit, including padding: v p Lc."""
        return self.chunks * self.stages * self.per_chunk

    @property
    def padding(self) -> int:
        """The number of padding places. They cost as much as layers."""
        return self.places - self.layers

    @property
    def numbers(self) -> np.ndarray:
        """The number of the layer at each place, [*shape]; places of padding count on."""
        return np.arange(self.places).reshape(self.shape)

    def staged(self, stack: jax.Array) -> jax.Array:
        """Reshapes [layers, ...] to [*shape, ...]; padding repeats the last layer."""
        if self.padding:
            last = jnp.repeat(stack[-1:], self.padding, axis=0)
            stack = jnp.concatenate([stack, last])
        return stack.reshape(*self.shape, *stack.shape[1:])

    def unstaged(self, stack: Stack) -> Stack:
        """Reshapes [*shape, ...] to [layers, ...], without the padding."""
        flat = stack.reshape(self.places, *stack.shape[len(self.shape) :])
        return flat[: self.layers]

    def describe(self) -> dict[str, int]:
        """Returns the fields in the form that a checkpoint records."""
        return asdict(self)


def lay_out(layers: int, stages: int, chunks: int) -> StageLayout:
    """Returns the layout with the least padding. A single stage always has one chunk."""
    if stages == 1:
        chunks = 1
    per_chunk = -(-layers // (stages * chunks))
    return StageLayout(chunks, stages, per_chunk, layers)
