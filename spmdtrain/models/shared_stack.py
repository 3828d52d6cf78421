"""Runs the layers of a model whose last ones read the keys and values of earlier ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.shared_keys import SHARED, SharedKeys
from spmdtrain.models.stack import (
    LAYER_INPUT,
    MakeBlock,
    SideLosses,
    Stack,
    rematerialised,
    sum_losses,
)

# Those of the last layer of each kind before the ones that share: by whether it has a window.
Kept = dict[bool, SharedKeys]


class SharedStack(Stack):
    """All layers of a model as one round, which is written out.

    Keys and values of a layer are results of it, and inputs of the layers that share them: so a
    backward pass that recomputes a layer gets those of the forward pass.
    """

    any_order = True

    def __init__(self, makers: Sequence[MakeBlock], config: TransformerConfig, rngs: nnx.Rngs):
        super().__init__(makers, config.layers, rngs)
        self.has_window = tuple(kind.window > 0 for kind in config.layer_kinds)
        self.own = config.layers - config.shared_keys  # layers with keys and values of their own

    def __call__(self, x: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, SideLosses]:
        """Returns x after the last block, and the side losses summed over the blocks."""
        if ctx.around_layer is not None:
            what = "a part of the step around layers does not go with model.shared_keys"
            raise ConfigError(what, fix="model.shared_keys=0")
        ctx = replace(self.context(x, ctx), scan_layers=False)
        kept: Kept = {}
        total = {}
        for place, (graphdef, parameters) in enumerate(self._blocks()):

            def layer(x, keys, ctx, parameters, place=place, graphdef=graphdef):
                if ctx.remat == "offload":
                    x = checkpoint_name(x, LAYER_INPUT)
                block: Any = nnx.merge(graphdef, ctx.gather_layer(parameters))
                return block.extend(x, self._at(place, keys, ctx), None)

            run = rematerialised(layer, ctx.remat, ctx.scan_layers)
            x, keys, side_losses = run(x, self._shared(place, kept), ctx, parameters)
            kept = self._kept(place, keys, kept)
            total = sum_losses(total, side_losses)
        return x, total

    def extend(
        self, x: jax.Array, ctx: ForwardContext, caches: Sequence[Any]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Returns (stream, caches) after the tokens of x; a layer that shares keys has no cache."""
        kept: Kept = {}
        grown = []
        for place, (graphdef, parameters) in enumerate(self._blocks()):
            block: Any = nnx.merge(graphdef, ctx.gather_layer(parameters))
            cache = jax.tree.map(lambda array: array[0], caches[place])
            at_layer = self._at(place, self._shared(place, kept), ctx)
            x, keys, _ = block.extend(x, at_layer, cache)
            kept = self._kept(place, keys, kept)
            own = None if keys is None else keys.cache
            grown.append(jax.tree.map(lambda array: array[None], own))
        return x, tuple(grown)

    def _blocks(self) -> list[tuple[Any, Any]]:
        """Returns (graphdef, parameters) of each layer."""
        layers: Any = self.layer
        split = [nnx.split(block) for block in layers.block]
        return [(graphdef, jax.tree.map(lambda w: w[0], state)) for graphdef, state in split]

    def _at(self, place: int, keys: SharedKeys | None, ctx: ForwardContext) -> ForwardContext:
        """Returns the context of a layer, with the keys and values that it may share."""
        at_layer = ctx.at_layer(0).at_layer(place, self.count)
        return replace(at_layer, read={**ctx.read, SHARED: keys})

    def _shared(self, place: int, kept: Kept) -> SharedKeys | None:
        """Returns the keys and values that a layer shares; None: it has its own."""
        return kept[self.has_window[place]] if place >= self.own else None

    def _kept(self, place: int, keys: SharedKeys | None, kept: Kept) -> Kept:
        """Returns what later layers may share, after this one."""
        return {**kept, self.has_window[place]: keys} if keys is not None else kept
