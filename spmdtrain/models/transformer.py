"""A decoder-only transformer that spells GPT-2 and Llama by configuration, in the parts a framework
needs: `embed`, stacked `blocks`, `head`. Letters as in layers.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import Attention, Cache, Embedding, Mlp, Norm, weight
from spmdtrain.models.stack import SideLosses, Stack, sum_losses, with_losses
from spmdtrain.parallel.axes import STREAM

EMBED_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2  # where dropout acts
MakeNorm = Callable[[TransformerConfig], nnx.Module]
MakePart = Callable[[TransformerConfig, nnx.Rngs], nnx.Module]


class Block(nnx.Module):
    """Pre-norm attention and mlp, each added to the residual stream.

    Its parts may be exchanged: `norm(config)` makes a module called as `norm(x_bte, ctx)`,
    `mlp(config, rngs)` one called alike, and `attention(config, rngs)` one called as
    `attention(x_bte, ctx, cache) -> (y_bte, cache)`. Attention and mlp may give (y_bte, side
    losses) in place of y_bte, as `Stack` says of a block.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        norm: MakeNorm = Norm,
        attention: MakePart = Attention,
        mlp: MakePart = Mlp,
    ):
        self.attention_norm = norm(config)
        self.attention = attention(config, rngs)
        self.mlp_norm = norm(config)
        self.mlp = mlp(config, rngs)

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> Any:
        """Returns the stream [b, t, e], or a pair of it and the side losses of the parts."""
        x_bte, _, side_losses = self.extend(x_bte, ctx, None)
        return (x_bte, side_losses) if side_losses else x_bte

    def extend(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None, SideLosses]:
        """Returns (stream, cache, side losses): `__call__` with the keys and values of earlier
        tokens, to which those of this call are appended.
        """
        y, cache = self.attention(self.attention_norm(x_bte, ctx), ctx, cache)
        y, of_attention = with_losses(y, self.attention)
        x_bte = ctx.constrain(x_bte + ctx.dropout(y, ATTENTION_SITE), *STREAM)
        y, of_mlp = with_losses(self.mlp(self.mlp_norm(x_bte, ctx), ctx), self.mlp)
        x_bte = ctx.constrain(x_bte + ctx.dropout(y, MLP_SITE), *STREAM)
        return x_bte, cache, sum_losses(of_attention, of_mlp)


# Settings that no layer obeys yet.
UNBUILT = (
    *("qkv_bias", "out_bias", "mlp_bias", "norm_places", "norm_offset", "query_norm", "windows"),
    *("rope_layers", "rope_theta_window", "rope_share", "rope_scaling", "score_scale"),
    *("score_cap", "logit_cap", "embed_scale", "residual_scale", "logit_scale", "sinks"),
)


def _refuse_unbuilt(config: TransformerConfig) -> None:
    if config.mlp in ("geglu", "gelu_exact"):
        raise ConfigError(f"model.mlp={config.mlp!r} is not built yet")
    for name in UNBUILT:
        value = getattr(config, name)
        if value != type(config).model_fields[name].default:
            raise ConfigError(f"model.{name}={value} is not built yet")


def _rows(table_te: jax.Array, positions_bt: jax.Array) -> jax.Array:
    return table_te[positions_bt]


class Transformer(nnx.Module):
    """`config.model` with its vocab resolved; `config.max_length` positions.

    The parts of its blocks may be exchanged, see `Block`: a run takes
    `make=partial(Transformer, mlp=MyMlp)`.
    """

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
                raise ConfigError(f"{name}={part!r:.80} makes no part of a block", fix="a class")
        model = config.model
        _refuse_unbuilt(model)
        self.tokens = Embedding(config.vocab, model.embed, rngs)
        learned = model.positions == "learned"
        shape = (config.max_length, model.embed)
        self.positions_te = weight(rngs, shape, ("position", "embed")) if learned else None
        self.blocks = Stack(lambda rngs: Block(model, rngs, **parts), model.layers, rngs)
        self.norm = norm(model)
        if model.tied:
            self.unembed_ve = None
        else:
            self.unembed_ve = weight(rngs, (config.vocab, model.embed), ("vocab", "embed"))

    def embed(self, tokens_bt: jax.Array, ctx: ForwardContext) -> jax.Array:
        x_bte = self.tokens(tokens_bt, ctx)
        if self.positions_te is not None:
            # On each device's own tokens, from the whole table: XLA aborts where it has to
            # partition the lookup or its gradient in some ways (jax 0.10 and 0.12).
            tokens = ("batch", "stream_time")
            arrays = (self.positions_te[...], ctx.positions_bt)
            x_bte = x_bte + ctx.local_map(_rows, arrays, ((None, None), tokens), (*tokens, None))
        above = ctx.at_layer(self.blocks.count)  # noise of its own: no block has this number
        return above.dropout(ctx.constrain(x_bte, *STREAM), EMBED_SITE)

    def head(self, x_bte: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, jax.Array]:
        """Hidden [b, t, e] and weight [v, e], whose product are the logits.

        The loss never forms all of them.
        """
        table = self.tokens.table_ve if self.unembed_ve is None else self.unembed_ve
        return ctx.constrain(self.norm(x_bte, ctx), *STREAM), table[...]

    def extend(
        self, tokens_bt: jax.Array, ctx: ForwardContext, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Logits [b, v] of the last token in float32, and the cache with these tokens in it.

        The cache is stacked over layers.
        """
        graphdef, parameters = nnx.split(self.blocks.layer)

        def body(x_bte, layer):
            number, parameters, k_bskd, v_bskd = layer
            block: Any = nnx.merge(graphdef, ctx.gather(parameters))
            seen = Cache(k_bskd, v_bskd, cache.length)
            x_bte, grown, _ = block.extend(x_bte, ctx.at_layer(number), seen)
            return x_bte, (grown.k_bskd, grown.v_bskd)

        x_bte = self.embed(tokens_bt, ctx)
        layers = (jnp.arange(self.blocks.count), parameters, cache.k_bskd, cache.v_bskd)
        x_bte, (k, v) = jax.lax.scan(body, x_bte, layers)
        hidden, table = self.head(x_bte[:, -1:], ctx)
        logits = jnp.einsum("bte,ve->btv", hidden, table, preferred_element_type=jnp.float32)[:, 0]
        return logits, Cache(k, v, cache.length + tokens_bt.shape[1])
