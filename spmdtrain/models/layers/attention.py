"""Grouped-query attention: one projection to queries, keys and values, and one back."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.attention import attention
from pallas_kernels.choose import Refused
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.cache import Cache
from spmdtrain.models.layers.kinds import by_kind, kind_of
from spmdtrain.models.layers.norm import QueryKeyNorm
from spmdtrain.models.layers.rope import make_rotation
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight, recomputed
from spmdtrain.parallel.context.ring import ContextRing, ring_attention
from spmdtrain.parallel.context.ulysses import heads_for_time, own_heads
from spmdtrain.parallel.regions import Whole

Position = Callable[[jax.Array, jax.Array], jax.Array]
OF_QUERIES = ("batch", "time", "kv_heads", None, None)  # logical axes
OF_KEYS = ("batch", "time", "kv_heads", None)


class Attention(nnx.Module):
    """Grouped-query attention within segments: to earlier tokens, or without `causal` to all.

    One fused projection makes queries, keys and values. `position(x_btkgd, positions_bt)` marks
    queries and keys with the position of their token; default: the rotary settings of `model`. The
    window and the rotation of a layer follow from its number, `ctx.layer`.
    """

    keeps_cache = True  # with a cache, the result for new tokens is as if all were there

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        position: Position | None = None,
        causal: bool = True,
    ):
        if any(config.windows) and not causal:
            what = "model.windows holds the tokens before; attention here is not causal"
            raise ConfigError(what, fix="--set model.windows=[]")
        self.position = position
        self.causal = causal
        self.rotation = make_rotation(config)
        self.windows = tuple(each.window for each in config.layer_kinds)
        self.score_scale = config.score_factor
        self.score_cap = config.score_cap
        self.heads = config.key_value_heads
        self.dim = config.width_per_head
        self.group = config.heads // self.heads
        self.implementation = None if config.attention == "auto" else config.attention
        # The slots of a key-value head: its group of query heads, its keys, its values.
        slots = self.group + 2
        qkv_shape = (config.embed, self.heads, slots, self.dim)
        out_shape = (self.heads, self.group, self.dim, config.embed)
        std = hidden_std(config)
        out_std = std * (2 * config.layers) ** -0.5
        qkv_axes = ("embed", "kv_heads", None, "head_dim")
        self.qkv_eknd = matmul_weight(rngs, qkv_shape, qkv_axes, std)
        out_axes = ("kv_heads", None, "head_dim", "embed")
        self.out_kgde = matmul_weight(rngs, out_shape, out_axes, out_std)
        qkv_width = self.heads * slots * self.dim
        self.qkv_bias = bias(qkv_width, "kv_heads") if config.has_qkv_bias else None
        self.out_bias = bias(config.embed, "norm") if config.has_out_bias else None
        self.query_key_norm = QueryKeyNorm(config) if config.query_norm != "none" else None
        # In the order of the heads: those of a key-value head follow each other.
        self.sinks = bias(config.heads, "kv_heads") if config.sinks else None

    @property
    def any_order(self) -> bool:
        """True if tokens may come in any order, with their positions: see AbstractModel."""
        return self.causal

    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        of_qkv = ("kv_heads", None, "head_dim")
        qkv = ctx.column_parallel(x_bte, self.qkv_eknd, of_qkv)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...].reshape(qkv.shape[2:])
        qkv = ctx.constrain(qkv, "batch", "time", *of_qkv)
        q, k = self._with_positions(qkv, ctx)
        v = qkv[..., -1, :]
        if cache is not None:
            if not self.causal:
                what = "a key-value cache holds earlier tokens, but this attention is not causal"
                raise ConfigError(what, fix="Attention(causal=True)")
            cache = cache.extended(k, v)
            k = cache.k_bskd
            v = cache.v_bskd
        attended = self._attend(q, k, v, ctx, cache)
        attended = ctx.constrain(attended, "batch", "time", *of_qkv)
        y = ctx.row_parallel(attended, self.out_kgde, of_qkv)
        if self.out_bias is not None:
            y = y + self.out_bias[...]
        return y, cache

    def _with_positions(
        self, qkv_btknd: jax.Array, ctx: ForwardContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns queries [b, t, k, g, d] and keys [b, t, k, d], normed and rotated."""
        position = self.position
        if position is None and self.rotation is not None:
            position = partial(self.rotation, number=ctx.layer)
        if position is None and self.query_key_norm is None:
            return qkv_btknd[..., :-2, :], qkv_btknd[..., -2, :]
        qk = qkv_btknd[..., :-1, :]
        if self.query_key_norm is not None:
            qk = self.query_key_norm(qk)
        if position is not None:
            qk = position(qk, ctx.positions_bt)
        return qk[..., :-1, :], qk[..., -1, :]

    def _attend(
        self, q_btkgd, k_bskd, v_bskd, ctx: ForwardContext, cache: Cache | None
    ) -> jax.Array:
        """Attends on each device from its own heads and queries to all keys: [b, t, k, g, d]."""
        if cache is None and ctx.way.name == "ring":
            return self._attend_by_ring(q_btkgd, k_bskd, v_bskd, ctx)
        if cache is None and ctx.way.name == "ulysses":
            return self._attend_by_ulysses(q_btkgd, k_bskd, v_bskd, ctx)
        places_bs = jnp.broadcast_to(jnp.arange(k_bskd.shape[1]), k_bskd.shape[:2])
        places_bt = places_bs if cache is None else ctx.positions_bt

        def local(  # noqa: PLR0913 - the arrays of attention
            q, k, v, q_segments, k_segments, q_places, k_places, sinks, layer
        ):
            # With all queries on this device, the mask is known while tracing.
            aligned = not self.causal or (cache is None and q.shape[1] == k.shape[1])
            options = {
                "segment_ids": None if q_segments is None else (q_segments, k_segments),
                "positions": None if aligned else (q_places, k_places),
            }
            number = _number(ctx, layer)
            return by_kind(self.windows, number, partial(self._seen, q, k, v, sinks, options))

        # Keys are split over time like queries, and gathered here. A cache is not split.
        key_time = Whole("time") if cache is None else None
        of_k = ("batch", key_time, "kv_heads", None)
        of_q_token = ("batch", "time")
        of_k_token = ("batch", key_time)
        segments = ctx.segment_ids_bt if cache is None else None
        sinks = self._wide_sinks()
        layer = self._traced_layer(ctx)
        arrays = (q_btkgd, k_bskd, v_bskd, segments, segments, places_bt, places_bs, sinks, layer)
        of_tokens = (of_q_token, of_k_token, of_q_token, of_k_token)
        names = (OF_QUERIES, of_k, of_k, *of_tokens, ("kv_heads",), ())
        return ctx.local_map(local, arrays, names, OF_QUERIES)

    def _attend_by_ring(self, q_btkgd, k_btkd, v_btkd, ctx: ForwardContext) -> jax.Array:
        """Attends to keys that go round the devices of the tokens: [b, t, k, g, d]."""
        tokens = q_btkgd.shape[1]
        befores = [_before(window, tokens) for window in dict.fromkeys(self.windows)]
        kind = None
        if len(set(befores)) == 1:
            befores = befores[:1]
        elif isinstance(ctx.layer, int):
            befores = [_before(self.windows[ctx.layer], tokens)]
        else:
            kind = kind_of(self.windows, ctx.layer)
        ring = ContextRing(
            axes=ctx.way.axes,
            ways=ctx.way.ways,
            windows=tuple(befores),
            softcap=self.score_cap,
            scale=self.score_scale,
            implementation=self.implementation,
        )

        def local(q, k, v, segments, sinks, kind):  # noqa: PLR0913 - the arrays of attention
            q_bthd = q.reshape(*q.shape[:2], -1, self.dim)
            with self._saying_what_refuses():
                found: Any = ring_attention(ring, q_bthd, k, v, segments, kind)
            out, lse = found
            if sinks is not None:
                out = _sunk(out, lse, sinks)
            return out.reshape(q.shape)

        arrays = (q_btkgd, k_btkd, v_btkd, ctx.segment_ids_bt, self._wide_sinks(), kind)
        names = (OF_QUERIES, OF_KEYS, OF_KEYS, ("batch", "time"), ("kv_heads",), ())
        return ctx.local_map(local, arrays, names, OF_QUERIES)

    def _attend_by_ulysses(self, q_btkgd, k_btkd, v_btkd, ctx: ForwardContext) -> jax.Array:
        """Attends on each device to all tokens with a part of the heads: [b, t, k, g, d]."""
        axes = ctx.way.axes

        def local(q, k, v, segments, sinks, layer):  # noqa: PLR0913 - the arrays of attention
            if sinks is not None:
                sinks = own_heads(sinks, axes, ctx.way.ways)
            number = _number(ctx, layer)
            pair = None if segments is None else (segments, segments)
            options = {"segment_ids": pair, "positions": None}

            def attend(q, k, v):
                return by_kind(self.windows, number, partial(self._seen, q, k, v, sinks, options))

            return heads_for_time(attend, axes, q, k, v)

        layer = self._traced_layer(ctx)
        arrays = (q_btkgd, k_btkd, v_btkd, ctx.segment_ids_bt, self._wide_sinks(), layer)
        of_tokens = ("batch", Whole("time"))
        names = (OF_QUERIES, OF_KEYS, OF_KEYS, of_tokens, ("kv_heads",), ())
        return ctx.local_map(local, arrays, names, OF_QUERIES)

    def _wide_sinks(self) -> jax.Array | None:
        """Returns the sinks in float32: their gradient is summed over devices that share them."""
        return None if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def _traced_layer(self, ctx: ForwardContext) -> jax.Array | None:
        """Returns the number of the layer if windows depend on it and tracing does not know it."""
        if len(set(self.windows)) > 1 and isinstance(ctx.layer, jax.Array):
            return ctx.layer
        return None

    def _seen(
        self, q_btkgd, k_bskd, v_bskd, sinks_h, options: dict[str, Any], window: int
    ) -> jax.Array:
        """Returns what queries see through a window, 0 for all tokens: [b, t, k, g, d].

        A sink is one more column of the softmax, without a value: the others lose the share of the
        sink, and keep sigmoid(lse - sink).
        """
        q_bthd = q_btkgd.reshape(*q_btkgd.shape[:2], -1, self.dim)
        before = _before(window, k_bskd.shape[1])
        with self._saying_what_refuses():
            found: Any = attention(
                q_bthd,
                k_bskd,
                v_bskd,
                causal=self.causal,
                window=None if before is None else (before, 0),
                softcap=self.score_cap,
                scale=self.score_scale,
                return_lse=sinks_h is not None,
                implementation=self.implementation,
                **options,
            )
        if sinks_h is None:
            return found.reshape(q_btkgd.shape)
        return _sunk(*found, sinks_h).reshape(q_btkgd.shape)

    @contextlib.contextmanager
    def _saying_what_refuses(self) -> Iterator[None]:
        """Turns the refusal of a kernel into a ConfigError."""
        try:
            yield
        except Refused as refused:
            asked = f"model.attention={self.implementation!r}"
            what = f"{asked} cannot run: {refused.reason}"
            raise ConfigError(what, fix="--set model.attention=auto") from None


def _number(ctx: ForwardContext, layer: jax.Array | None) -> jax.Array | int | None:
    """Returns the number of the layer; `layer` is the traced one of `_traced_layer`."""
    return ctx.layer if layer is None else layer


def _before(window: int, tokens: int) -> int | None:
    """Returns how many tokens before its own a query sees; None: all. `window` is a setting."""
    return window - 1 if 0 < window < tokens else None


@recomputed
def _sunk(y_bthd: jax.Array, lse_bth: jax.Array, sinks_h: jax.Array) -> jax.Array:
    """Returns the output of attention if a sink takes its share of each head's softmax."""
    share_bth = jax.nn.sigmoid(lse_bth - sinks_h)
    return (y_bthd * share_bth[..., None]).astype(y_bthd.dtype)
