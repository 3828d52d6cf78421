"""Defines grouped-query attention: one projection to queries, keys and values, and one back."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.bias import biased_heads
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.attend import make_attend
from spmdtrain.models.layers.cache import Cache
from spmdtrain.models.layers.norm import QueryKeyNorm
from spmdtrain.models.layers.rope import make_rotation
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight

Position = Callable[[jax.Array, jax.Array], jax.Array]


class Attention(nnx.Module):
    """Grouped-query attention within segments: to earlier tokens, or without `causal` to all.

    One fused projection makes queries, keys and values. `position(x_btkgd, positions_bt)` marks
    queries and keys with the position of their token; default: the rotary settings of `model`. The
    window and the rotation of a layer follow from its number, `ctx.layer`.
    """

    keeps_cache = True  # with a cache, new tokens get the results of a pass over all tokens

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        position: Position | None = None,
        causal: bool = True,
    ):
        if any(config.windows) and not causal:
            what = "model.windows counts earlier tokens; attention here is not causal"
            raise ConfigError(what, fix="--set model.windows=[]")
        self.position = position
        self.causal = causal
        self.rotation = make_rotation(config)
        self.attend = make_attend(config, causal=causal)
        self.heads = config.kv_heads
        self.group = config.heads // self.heads
        # The slots of a key-value head: its group of query heads, its keys, its values.
        slots = self.group + 2
        qkv_shape = (config.embed, self.heads, slots, config.head_dim)
        out_shape = (self.heads, self.group, config.head_dim, config.embed)
        std = hidden_std(config)
        out_std = std * (2 * config.layers) ** -0.5
        qkv_axes = ("embed", "kv_heads", None, "head_dim")
        self.qkv_eknd = matmul_weight(rngs, qkv_shape, qkv_axes, std)
        out_axes = ("kv_heads", None, "head_dim", "embed")
        self.out_kgde = matmul_weight(rngs, out_shape, out_axes, out_std)
        qkv_width = self.heads * slots * config.head_dim
        self.qkv_bias = bias(qkv_width, "kv_heads") if config.qkv_bias else None
        self.out_bias = bias(config.embed, "norm") if config.out_bias else None
        self.query_key_norm = QueryKeyNorm(config) if config.query_norm != "none" else None
        # In the order of the heads: those of a key-value head follow each other.
        self.sinks = bias(config.heads, "kv_heads") if config.sinks else None

    @property
    def any_order(self) -> bool:
        """True if tokens may come in any order, with their positions: see AbstractModel."""
        return self.causal

    @part("attention")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        of_qkv = ("kv_heads", None, "head_dim")
        qkv = ctx.column_parallel(x_bte, self.qkv_eknd, of_qkv)
        q, k, v = self._heads(qkv, ctx)
        if cache is not None:
            if not self.causal:
                what = "a key-value cache holds earlier tokens, but this attention is not causal"
                raise ConfigError(what, fix="Attention(causal=True)")
            cache = cache.extended(k, v)
            k = cache.k_bskd
            v = cache.v_bskd
        sinks = None if self.sinks is None else self.sinks[...]
        attended = self.attend(q, k, v, ctx, cache=cache, sinks=sinks)
        attended = ctx.constrain(attended, "batch", "time", *of_qkv)
        y = ctx.row_parallel(attended, self.out_kgde, of_qkv)
        if self.out_bias is not None:
            y = y + self.out_bias[...]
        return y, cache

    def _heads(
        self, qkv_btknd: jax.Array, ctx: ForwardContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [b, t, k, g, d] and keys [b, t, k, d], normed and rotated, and values.

        They are split, not indexed: their gradients are then put side by side, and not each padded
        to the whole and added.
        """
        of_heads = ("kv_heads", None, "head_dim")
        position = self.position
        if position is None and self.rotation is not None:
            position = partial(self.rotation, number=ctx.layer)
        stays = position is None and self.query_key_norm is None
        if self.qkv_bias is not None:
            bias_knd = self.qkv_bias[...].reshape(qkv_btknd.shape[2:])
            if stays:
                of_keys = ("batch", "time", "kv_heads", "head_dim")
                names = ("batch", "time", *of_heads), of_heads
                out = names[0], of_keys, of_keys
                return ctx.local_map(biased_heads, (qkv_btknd, bias_knd), names, out)
            # As a vector: XLA would write a bias of several dims out for each token.
            wide = qkv_btknd.reshape(*qkv_btknd.shape[:2], -1) + bias_knd.reshape(-1)
            qkv_btknd = wide.reshape(qkv_btknd.shape)
        qkv_btknd = ctx.constrain(qkv_btknd, "batch", "time", *of_heads)
        qk, v = jnp.split(qkv_btknd, [self.group + 1], -2)
        if self.query_key_norm is not None:
            qk = self.query_key_norm(qk, ctx)
        if position is not None:
            qk = position(qk, ctx.positions_bt)
        q, k = jnp.split(qk, [self.group], -2)
        return q, jnp.squeeze(k, -2), jnp.squeeze(v, -2)
