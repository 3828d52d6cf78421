"""Runs several stacks one after another, for layers that no single round repeats."""

from collections.abc import Sequence

import jax
from flax import nnx

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import SideLosses, Stack, sum_losses

# Stacks count their layers from 0; segment n has the noise of no layer, but of NOISE + n.
NOISE = 1 << 20


class Segments(Stack):
    """Several stacks, each with layers of other shapes, that run one after another.

    They are no whole rounds, so a pipeline cannot share them out.
    """

    any_order = True

    def __init__(self, stacks: Sequence[Stack]):
        self.segment = nnx.List(stacks)
        self.count = sum(stack.count for stack in stacks)
        self.rounds = 1

    @property
    def stacks(self) -> Sequence[Stack]:
        """The segments, in order."""
        return tuple(self.segment)

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, SideLosses]:
        """Returns x after the last block, and the side losses summed over the blocks."""
        ctx = self.context(x, ctx)
        total = {}
        for number, stack in enumerate(self.segment):
            x, side_losses = stack(x, ctx.with_noise_of(NOISE + number))
            total = sum_losses(total, side_losses)
        return x, total
