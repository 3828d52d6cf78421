"""Defines multi-head latent attention: keys and values of all heads are computed from a narrow
latent.

Letters in addition to those of this room: n channels of a query or key that are not rotated, h
channels that are, r and c the widths of the latents of queries, and of keys and values; u all
channels of the down projection.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.attend import make_attend
from spmdtrain.models.layers.attention.temperature import make_temperature
from spmdtrain.models.layers.cache import Cache
from spmdtrain.models.layers.norm import norm_scale, rms_normed
from spmdtrain.models.layers.rope import make_rotation
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight

OF_HEADS = ("kv_heads", None, "head_dim")  # logical axes


class LatentAttention(nnx.Module):
    """Attention by the latents of [model.latent] (arXiv:2405.04434, section 2.1).

    Queries and keys of a head have n channels computed from a latent, then h channels rotated by
    the position of the token. The rotated channels of keys are computed from the stream, and all
    heads share them. A cache holds the latent and the rotated channels, c + h numbers per token.
    Queries then attend to the latent itself: the matrix from latent to keys multiplies the queries
    instead, and the one from latent to values multiplies the attention output.
    """

    any_order = True
    keeps_cache = True  # with a cache, new tokens get the results of a pass over all tokens

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        latent = config.latent
        assert latent is not None, "a model with latent attention"
        self.rotation = make_rotation(config)
        temperature = config.temperature
        self.temperature = make_temperature(temperature, config) if temperature else None
        self.attend = make_attend(config)
        self.epsilon = latent.epsilon or config.norm_epsilon
        self.offset = config.norm_offset
        self.plain_dim, self.rope_dim = latent.plain_dim, latent.rope_dim
        self.rank, self.query_rank = latent.rank, latent.query_rank or 0
        heads, width = config.heads, config.head_dim
        std = hidden_std(config)
        out_std = std * (2 * config.layers) ** -0.5
        # One matrix for everything that the stream is projected to: the latent of queries, that of
        # keys and values, and the rotated channels of keys.
        down_shape = (config.embed, self.query_rank + self.rank + self.rope_dim)
        self.down_eu = matmul_weight(rngs, down_shape, ("embed", "rank"), std)
        of_queries = ("latent" if self.query_rank else "embed", "kv_heads", "head_dim")
        query_shape = (self.query_rank or config.embed, heads, width)
        self.query_rkd = matmul_weight(rngs, query_shape, of_queries, std)
        key_shape = (self.rank, heads, self.plain_dim + latent.value_dim)
        self.key_value_ckd = matmul_weight(rngs, key_shape, ("latent", *of_queries[1:]), std)
        out_shape = (heads, 1, latent.value_dim, config.embed)
        self.out_kgde = matmul_weight(rngs, out_shape, (*OF_HEADS, "embed"), out_std)
        self.out_bias = bias(config.embed, "norm") if config.out_bias else None
        has_scale = self.query_rank > 0
        self.query_scale = norm_scale(config, self.query_rank, "norm") if has_scale else None
        self.latent_scale = norm_scale(config, self.rank, "norm")
        self.sinks = bias(heads, "kv_heads") if config.sinks else None

    @part("attention")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        down_btu = ctx.column_parallel(x_bte, self.down_eu, (None,))
        latent_btc, turned_bth = jnp.split(down_btu[..., self.query_rank :], [self.rank], -1)
        latent_btc = self._normed(latent_btc, self.latent_scale, ctx)
        turned_bth = self._turned(turned_bth[:, :, None, None], ctx)[:, :, 0, 0]
        q_btkd = self._queries(x_bte, down_btu[..., : self.query_rank], ctx)
        sinks = None if self.sinks is None else self.sinks[...]
        if cache is None:
            kv = ctx.column_parallel(latent_btc, self.key_value_ckd, OF_HEADS[::2])
            plain, values = jnp.split(kv, [self.plain_dim], -1)
            shared = jnp.broadcast_to(
                turned_bth[:, :, None], (*plain.shape[:-1], turned_bth.shape[-1])
            )
            keys = ctx.constrain(
                jnp.concatenate((plain, shared), -1), "batch", "time", *OF_HEADS[::2]
            )
            y = self.attend(q_btkd[:, :, :, None], keys, values, ctx, sinks=sinks)
        else:
            cache = cache.extended(turned_bth[:, :, None], latent_btc[:, :, None])
            y = self._from_cache(q_btkd, ctx, cache, sinks)
        y = ctx.constrain(y, "batch", "time", *OF_HEADS)
        y = ctx.row_parallel(y, self.out_kgde, OF_HEADS)
        if self.out_bias is not None:
            y = y + self.out_bias[...]
        return y, cache

    def _queries(self, x_bte: jax.Array, latent_btr: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns the queries [b, t, k, n + h], with the last h channels rotated."""
        if self.query_scale is not None:
            x_bte = self._normed(latent_btr, self.query_scale, ctx)
        q = ctx.column_parallel(x_bte, self.query_rkd, OF_HEADS[::2])
        q = ctx.constrain(q, "batch", "time", *OF_HEADS[::2])
        plain, turned = jnp.split(q, [self.plain_dim], -1)
        turned = self._turned(turned[:, :, :, None], ctx)[:, :, :, 0]
        q = jnp.concatenate((plain, turned), -1)
        return (
            q if self.temperature is None else self.temperature(q[:, :, :, None], ctx)[:, :, :, 0]
        )

    def _turned(self, x_btkgh: jax.Array, ctx: ForwardContext) -> jax.Array:
        if self.rotation is None:
            return x_btkgh
        return self.rotation(x_btkgh, ctx.positions_bt, ctx.layer)

    def _normed(self, x_btr: jax.Array, scale_r: nnx.Param, ctx: ForwardContext) -> jax.Array:
        scale = scale_r[...].astype(jnp.float32) + self.offset
        return rms_normed(x_btr, scale, (2,), self.epsilon, ctx)

    def _from_cache(self, q_btkd, ctx: ForwardContext, cache: Cache, sinks) -> jax.Array:
        """Attends to the latents of a cache, as keys and values that all heads share."""
        weight_ckd = self.key_value_ckd[...].astype(q_btkd.dtype)
        to_keys_ckn, to_values_cke = jnp.split(weight_ckd, [self.plain_dim], -1)
        plain, turned = jnp.split(q_btkd, [self.plain_dim], -1)
        q_btkc = jnp.einsum("btkn,ckn->btkc", plain, to_keys_ckn)
        q_btkd = jnp.concatenate((q_btkc, turned), -1)
        latent_bskc = cache.v_bskd
        keys = jnp.concatenate((latent_bskc, cache.k_bskd), -1)
        attended_btkc = self.attend(
            q_btkd[:, :, None], keys, latent_bskc, ctx, cache=cache, sinks=sinks, is_shared=True
        )[:, :, 0]
        return jnp.einsum("btkc,cke->btke", attended_btkc, to_values_cke)[:, :, :, None]
