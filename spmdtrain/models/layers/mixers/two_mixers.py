"""Defines the mixer "both": attention and a state space that read one input."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.cache import CacheOfBoth
from spmdtrain.models.layers.mixers.state_space import SsdMixer
from spmdtrain.models.scaled import scaled


class TwoMixers(nnx.Module):
    """Attention and the state space of [model.ssd] on one input, summed (arXiv:2507.22448).

    Each has a factor of its input and of its output: in [model.both] those of attention, and in its
    own table those of the state space.
    """

    any_order = True

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        attention: Callable[[TransformerConfig, nnx.Rngs], nnx.Module],
    ):
        self.in_factor = config.both.in_factor if config.both else 1
        self.out_factor = config.both.out_factor if config.both else 1
        self.attention = attention(config, rngs)
        self.ssd = SsdMixer(config, rngs)

    @property
    def mixers(self) -> tuple[nnx.Module, nnx.Module]:
        """The two mixers: a cache is kept if both of them keep theirs."""
        return self.attention, self.ssd

    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: CacheOfBoth | None = None
    ) -> tuple[Any, CacheOfBoth | None]:
        of_attention, of_ssd = cache or (None, None)
        call: Any = self.attention
        out, of_attention = call(scaled(x_bte, self.in_factor), ctx, of_attention)
        y_bte, *side_losses = out if isinstance(out, tuple) else (out,)
        of_state, of_ssd = self.ssd(x_bte, ctx, of_ssd)
        y_bte = scaled(y_bte, self.out_factor) + of_state
        grown = None if of_ssd is None else CacheOfBoth(of_attention, of_ssd)
        return (y_bte, *side_losses) if side_losses else y_bte, grown
