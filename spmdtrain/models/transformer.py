"""Defines a decoder-only transformer: GPT-2, Llama, Gemma and others by configuration.

It has the parts that the framework needs: `embed`, stacked `blocks`, `head`. Letters as in layers/.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import LayerParts, LayerStack, RunConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import (
    Attention,
    Embedding,
    Mlp,
    Norm,
    weight,
)
from spmdtrain.models.layers.cache import ModelCache, StackCache
from spmdtrain.models.layers.norm import MakeNorm, normed, normed_with_stream
from spmdtrain.models.layers.weights import INIT_STD
from spmdtrain.models.logits import logits_of
from spmdtrain.models.scaled import scaled
from spmdtrain.models.stack import MakeBlock, Round, SideLosses, Stack, sum_losses, with_losses
from spmdtrain.parallel.axes import STREAM

EMBED_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2  # where dropout acts
MakePart = Callable[[TransformerConfig, nnx.Rngs], nnx.Module]


class Block(nnx.Module):
    """A block of a transformer: attention and mlp, each added to the residual stream, with norms.

    `model.norm_places` says where: `attention_norm` and `mlp_norm` on the input of a part,
    `attention_out_norm` and `mlp_out_norm` on its output. If they are parallel, the mlp reads what
    attention reads. A block may lack one of its two parts, and has no norm of it then. An mlp with
    the attribute `reads_stream` reads it without a norm.

    Its parts may be replaced: `norm(config)` makes a module called as `norm(x_bte, ctx)`,
    `mlp(config, rngs)` one called in the same way, and `attention(config, rngs)` one called as
    `attention(x_bte, ctx, cache) -> (y_bte, cache)`. Attention and mlp may return (y_bte, side
    losses) instead of y_bte, like a block of `Stack`.

    `first`: the number of layers before the stack, which the stack does not count.
    """

    any_order = True

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        norm: MakeNorm = Norm,
        attention: MakePart | None = Attention,
        mlp: MakePart | None = Mlp,
        first: int = 0,
    ):
        self.first = first
        self.is_parallel = bool(attention and config.norm_places == "parallel")
        is_before = config.norm_places != "after"
        is_after = config.norm_places in ("after", "both")
        self.attention_norm = norm(config) if attention and is_before else None
        self.attention = attention(config, rngs) if attention else None
        self.attention_out_norm = norm(config) if attention and is_after else None
        self.mlp = mlp(config, rngs) if mlp else None
        reads_stream = getattr(self.mlp, "reads_stream", False)
        has_own_input = mlp and not self.is_parallel and not reads_stream
        self.mlp_norm = norm(config) if has_own_input and is_before else None
        self.mlp_out_norm = norm(config) if mlp and is_after else None
        self.residual_scale = config.residual_scale
        self.token_part = _token_part(config, rngs) if config.token_layers else None
        self.layer_scale = _layer_scale() if config.layer_scale else None

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> Any:
        """Returns the stream [b, t, e], or a pair of it and the side losses of the parts."""
        x_bte, _, side_losses = self.extend(x_bte, ctx, None)
        return (x_bte, side_losses) if side_losses else x_bte

    def extend(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Any
    ) -> tuple[jax.Array, Any, SideLosses]:
        """Returns (stream, cache, side losses): `__call__` with a cache of earlier tokens.

        The keys and values of this call are appended to it.
        """
        if self.first and ctx.layer is not None:
            ctx = replace(ctx, layer=ctx.layer + self.first)
        of_attention, of_mlp = {}, {}
        normed_bte = None
        if self.attention is not None:
            normed_bte, x_bte = normed_with_stream(self.attention_norm, x_bte, ctx)
            y, cache = self.attention(normed_bte, ctx, cache)
            y, of_attention = with_losses(y, self.attention)
            y = normed(self.attention_out_norm, y, ctx)
            x_bte = self._added(x_bte, y, ctx, ATTENTION_SITE)
        if self.mlp is not None:
            if not self.is_parallel:
                normed_bte, x_bte = normed_with_stream(self.mlp_norm, x_bte, ctx)
            y, of_mlp = with_losses(self.mlp(normed_bte, ctx), self.mlp)
            x_bte = self._added(x_bte, normed(self.mlp_out_norm, y, ctx), ctx, MLP_SITE)
        if self.token_part is not None:
            x_bte = ctx.constrain(self.token_part(x_bte, ctx), *STREAM)
        if self.layer_scale is not None:
            x_bte = self.layer_scale(x_bte, ctx)
        return x_bte, cache, sum_losses(of_attention, of_mlp)

    def _added(self, x_bte: jax.Array, y_bte: jax.Array, ctx: ForwardContext, site: int):
        """Returns the stream with the output of a part added."""
        y_bte = ctx.dropout(y_bte, site)
        return ctx.constrain(x_bte + scaled(y_bte, self.residual_scale), *STREAM)


def _rows(table_te: jax.Array, positions_bt: jax.Array) -> jax.Array:
    return table_te[positions_bt]


def _token_part(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    from spmdtrain.models.layers.token_layers import TokenPart

    return TokenPart(config, rngs)


def _token_layers(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    from spmdtrain.models.layers.token_layers import TokenLayers

    return TokenLayers(config, rngs)


def _layer_scale() -> nnx.Module:
    from spmdtrain.models.layers.layer_scale import LayerScale

    return LayerScale()


def _parts_of(
    model: TransformerConfig,
    layer: LayerParts,
    norm: MakeNorm,
    attention: MakePart,
    mlp: MakePart,
    *,
    shares: bool = False,
) -> dict[str, MakePart | None]:
    """Returns the makers of the parts that the settings of a layer name: `attention` and `mlp`
    where they name no others.
    """
    if model.latent:
        from spmdtrain.models.layers.attention.latent import LatentAttention

        attention = LatentAttention
    elif shares:
        attention = _sharing_keys(layer)
    elif model.value_norm or model.full:
        from spmdtrain.models.layers.attention.own_values import OwnValues

        attention = OwnValues
    parts: dict[str, MakePart | None] = {"attention": attention, "mlp": mlp}
    if layer.mixer != "attention":
        from spmdtrain.models.layers.mixers.all_mixers import mixer_of

        parts["attention"] = mixer_of(layer.mixer, attention)
    if layer.mlp == "experts":
        from spmdtrain.models.layers.expert_mlp import ExpertMlp

        parts["mlp"] = partial(ExpertMlp, norm=norm)
    elif layer.mlp == "none":
        parts["mlp"] = None
    return parts


def _sharing_keys(layer: LayerParts) -> MakePart:
    from spmdtrain.models.layers.attention.shared_keys import KeepingKeys, SharingKeys

    return SharingKeys if layer.shares_keys else KeepingKeys


def _shared_stack(makers: Sequence[MakeBlock], config: TransformerConfig, rngs: nnx.Rngs) -> Stack:
    from spmdtrain.models.shared_stack import SharedStack

    return SharedStack(makers, config, rngs)


def _segments(stacks: Sequence[Stack]) -> Stack:
    from spmdtrain.models.segments import Segments

    return Segments(stacks)


def _indexers(model: TransformerConfig) -> nnx.Module:
    from spmdtrain.models.layers.attention.indexers import Indexers

    return Indexers(model)


class Transformer(nnx.Module):
    """The transformer of `config.model`, whose vocab must be resolved, with `max_length` positions.

    Layers with experts have `ExpertMlp` as their mlp, and with `model.latent` all have
    `LatentAttention`. The first dense layers (`model.experts.first_dense`) are a separate stack,
    which `embed` runs.

    The parts of its blocks may be replaced, see `Block`: a run takes `make=partial(Transformer,
    mlp=MyMlp)`.
    """

    any_order = True

    def __init__(
        self,
        config: RunConfig,
        rngs: nnx.Rngs,
        *,
        norm: MakeNorm = Norm,
        attention: MakePart = Attention,
        mlp: MakePart = Mlp,
    ):
        parts = {"norm": norm, "attention": attention, "mlp": mlp}
        for name, part in parts.items():
            if not callable(part):
                raise ConfigError(f"{name}={part!r:.80} is not a part of a block", fix="a class")
        model = config.model
        if model.latent and attention is not Attention:
            what = "attention= and [model.latent] both make the attention of a layer"
            raise ConfigError(what, fix="one of them")
        if model.experts and mlp is not Mlp:
            what = "mlp= and [model.experts] both make the mlp of a layer"
            raise ConfigError(what, fix="one of them")
        self.tokens = Embedding(config.vocab, model.embed, rngs)
        learned = model.positions == "learned"
        shape = (config.model.max_length, model.embed)
        self.positions_te = weight(rngs, shape, ("position", "embed")) if learned else None

        def maker(layer: LayerParts, first: int) -> MakeBlock:
            """Returns the maker of a layer of a stack that begins after `first` layers."""
            settings = model.of_layer(layer)
            shares = model.shared_keys > 0
            of_layer = _parts_of(settings, layer, norm, attention, mlp, shares=shares)
            return partial(Block, settings, norm=norm, first=first, **of_layer)

        def make_stack(stack: LayerStack) -> Stack:
            makers = [maker(layer, stack.first) for layer in stack.pattern]
            if model.shared_keys:
                return _shared_stack(makers, model, rngs)
            return Stack(makers if len(makers) > 1 else makers[0], stack.layers, rngs)

        stacks = [make_stack(stack) for stack in model.stacks]
        self.first_blocks = stacks.pop(0) if model.stack_layers < model.layers else None
        self.blocks = stacks[0] if len(stacks) == 1 else _segments(stacks)
        if model.token_layers:
            self.blocks.beside = _token_layers(model, rngs)
        self.norm = norm(model)
        like_last = maker(model.further_parts, model.layers - 1)  # under its number
        depth = model.multi_token.depth if model.multi_token else 0
        further = None
        if depth:
            from spmdtrain.models.layers.multi_token import FurtherToken

            further = nnx.List(FurtherToken(model, rngs, like_last, norm) for _ in range(depth))
        self.further = further
        self.indexer = _indexers(model) if model.indexer else None
        self.further_after_norm = bool(model.multi_token and model.multi_token.after_norm)
        self.embed_factor = model.embed_factor
        self.rounds_embed_factor = model.embed_scale == "sqrt"
        self.logit_scale, self.logit_cap = model.logit_factor, model.logit_cap
        if model.tied:
            self.unembed_ve = None
        else:
            # 0 with muP: the logits of a random head would have another size in each width.
            std = INIT_STD if model.mup_base is None else 0.0
            self.unembed_ve = weight(rngs, (config.vocab, model.embed), ("vocab", "embed"), std)

    def embed(self, tokens_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        x_bte = self._embedded(tokens_bt, ctx)
        if self.first_blocks is None:
            return x_bte
        x_bte, side_losses = self.first_blocks(x_bte, self._of_first(ctx))
        if side_losses:
            names = ", ".join(side_losses)
            what = f"the {self.first_blocks.count} first dense layers have side losses: {names}"
            raise ConfigError(what, fix="parts without them, or model.experts.first_dense=0")
        return x_bte

    def _of_first(self, ctx: ForwardContext) -> ForwardContext:
        """Returns the context of the first layers, with noise that no other layer has."""
        return replace(ctx.with_noise_of(self.blocks.count + 1), frozen_layers=0)

    def _embedded(self, tokens_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        x_bte = self._of_tokens(tokens_bt, ctx)
        if self.positions_te is not None:
            # On each device's own tokens, from the whole table: XLA aborts if it has to partition
            # the lookup or its gradient in some ways (jax 0.10 and 0.12).
            tokens = ("batch", "stream_time")
            arrays = (self.positions_te[...], ctx.positions_bt)
            x_bte = x_bte + ctx.local_map(_rows, arrays, ((None, None), tokens), (*tokens, None))
        above = ctx.at_layer(self.blocks.count)  # noise of its own: no block has this number
        return above.dropout(ctx.constrain(x_bte, *STREAM), EMBED_SITE)

    def _of_tokens(self, tokens_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns the embeddings of tokens, without their positions."""
        x_bte = self.tokens(tokens_bt, ctx)
        factor: jax.Array | float = self.embed_factor
        if self.rounds_embed_factor:
            # In its dtype, like Gemma's training: in bfloat16 the root of 3072 is 55.5.
            factor = jnp.asarray(factor, x_bte.dtype).astype(jnp.float32)
        return scaled(x_bte, factor)

    def _table(self) -> jax.Array:
        return (self.tokens.table_ve if self.unembed_ve is None else self.unembed_ve)[...]

    def head(self, x_bte: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Returns hidden [b, t, e] and weight [v, e]: their products become logits.

        The model's scale and cap shape them. The loss never forms all of them.
        """
        return ctx.constrain(self.norm(x_bte, ctx), *STREAM), self._table()

    def predict_further(
        self,
        x_bte: jax.Array,
        tokens_nbt: Sequence[jax.Array],
        contexts: Sequence[ForwardContext],
    ) -> tuple[list[jax.Array], jax.Array, SideLosses]:
        """Returns (hidden [b, t, e] of each depth of model.multi_token, table, side losses).

        `x_bte` is the stream after the blocks; the products of hidden and table are the logits of
        the token after `tokens_nbt`, of which each depth reads its own.
        """
        from spmdtrain.models.layers.multi_token import predict_further

        assert self.further is not None, "a model with model.multi_token"
        contexts = [
            ctx.with_noise_of(self.blocks.count + 2 + depth) for depth, ctx in enumerate(contexts)
        ]
        embedded = [
            self._of_tokens(tokens_bt, ctx)
            for tokens_bt, ctx in zip(tokens_nbt, contexts, strict=True)
        ]
        after_norm = self.further_after_norm
        if after_norm:
            x_bte, _ = self.head(x_bte, contexts[0])
        hidden, losses = predict_further(
            self.further, x_bte, embedded, contexts, after_norm=after_norm
        )
        return hidden, self._table(), losses

    def extend(
        self, tokens_bt: jax.Array, ctx: ForwardContext, cache: ModelCache
    ) -> tuple[jax.Array, ModelCache]:
        """Returns the logits [b, v] of the last token in float32, and the cache after it."""
        x_bte = self._embedded(tokens_bt, ctx)
        caches = iter(cache.stacks)
        extended = []
        if self.first_blocks is not None:
            of_first = self._of_first(ctx)
            x_bte, grown = _extend_stack(self.first_blocks, x_bte, of_first, next(caches))
            extended.append(grown)
        ctx = self.blocks.context(x_bte, replace(ctx, ids_bt=tokens_bt))
        for stack, of_stack in zip(self.blocks.stacks, caches, strict=True):
            x_bte, grown = _extend_stack(stack, x_bte, ctx, of_stack)
            extended.append(grown)
        hidden, table = self.head(x_bte[:, -1:], ctx)
        logits = logits_of(hidden, table, self.logit_scale, self.logit_cap)[:, 0]
        return logits, ModelCache(tuple(extended), cache.length + tokens_bt.shape[1])


def _extend_stack(
    stack: Stack, x_bte: jax.Array, ctx: ForwardContext, caches: StackCache
) -> tuple[jax.Array, StackCache]:
    """Returns (stream, caches of all layers) of a stack after the tokens of x."""
    if stack.extend is not None:
        return stack.extend(x_bte, ctx, caches)
    graphdef, parameters = nnx.split(stack.layer)

    def body(x_bte, layer):
        number, parameters, caches = layer
        block: Any = nnx.merge(graphdef, ctx.gather_layer(parameters))
        at_round = ctx.at_layer(number)
        if not isinstance(block, Round):
            x_bte, cache, _ = block.extend(x_bte, at_round, caches[0])
            return x_bte, (cache,)
        grown = []
        member: Any
        for place, (member, cache) in enumerate(zip(block.block, caches, strict=True)):
            own = at_round.at_layer(place, len(caches))
            x_bte, cache, _ = member.extend(x_bte, own, cache)
            grown.append(cache)
        return x_bte, tuple(grown)

    return jax.lax.scan(body, x_bte, (jnp.arange(stack.rounds), parameters, caches))
