"""Computes attention on any mesh. Each device handles its own heads, and `ctx.context_method`
decides how its queries reach the keys of other devices.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attention
from pallas_kernels.attention.api import may_read_in_place
from pallas_kernels.choose import Refused
from pallas_kernels.counting import share_counted
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.cache import Cache
from spmdtrain.models.layers.kinds import by_kind, kind_of
from spmdtrain.models.layers.weights import recomputed
from spmdtrain.parallel.regions import Whole

OF_QUERIES = ("batch", "time", "kv_heads", None, None)  # logical axes
OF_KEYS = ("batch", "time", "kv_heads", None)


@dataclass(frozen=True)
class Attend:
    """The settings of a layer's attention; called with queries, keys and values of all heads.

    Letters in addition to those of this room: e the channels of a value.
    """

    windows: tuple[int, ...]  # for each layer, the tokens that a query sees; 0: all
    chunks: tuple[int, ...]  # for each layer, the tokens of a block that it does not leave; 0: none
    longest: int  # positions
    scale: float | None  # factor of scores; None: 1 / sqrt(channels of a key)
    cap: float | None
    implementation: str | None
    causal: bool = True

    def __call__(
        self,
        q_btkgd: jax.Array,
        k_bskd: jax.Array,
        v_bske: jax.Array,
        ctx: ForwardContext,
        *,
        cache: Cache | None = None,
        sinks: jax.Array | None = None,
        is_shared: bool = False,
    ) -> jax.Array:
        """Returns the attention output of each query, [b, t, k, g, e].

        `cache`: the source of the keys and values, including those of earlier tokens. `sinks`: a
        logit for each head, grouped by key-value head. `is_shared`: all heads share the keys and
        values of a cache, and k is 1.
        """
        if sinks is not None:
            # Their gradient is summed over the devices that share them.
            sinks = sinks.astype(jnp.float32)
        if any(self.chunks) and cache is None:
            blocks_bt = self._blocks(ctx, ctx.positions_bt, ctx.segment_ids_bt)
            ctx = replace(ctx, segment_ids_bt=blocks_bt)
        method = ctx.context_method
        if cache is None and method and method.name == "ring":
            return self._by_ring(q_btkgd, k_bskd, v_bske, sinks, ctx)
        if cache is None and method and method.name == "ulysses":
            return self._by_ulysses(q_btkgd, k_bskd, v_bske, sinks, ctx)
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
            attend_in_window = partial(self._attend, ctx, q, k, v, sinks, options)
            return by_kind(self._kinds, number, attend_in_window)

        # Keys are split over time like queries, and gathered here. A cache is not split.
        key_time = Whole("time") if cache is None else None
        of_groups = (None, "kv_heads") if is_shared else ("kv_heads", None)
        of_q = ("batch", "time", *of_groups, None)
        of_k = ("batch", key_time, of_groups[0], None)
        of_q_token = ("batch", "time")
        of_k_token = ("batch", key_time)
        q_segments = k_segments = ctx.segment_ids_bt if cache is None else None
        if any(self.chunks) and cache is not None:
            q_segments, k_segments = self._blocks(ctx, places_bt), self._blocks(ctx, places_bs)
        layer = self._traced_layer(ctx)
        segments = (q_segments, k_segments)
        arrays = (q_btkgd, k_bskd, v_bske, *segments, places_bt, places_bs, sinks, layer)
        of_tokens = (of_q_token, of_k_token, of_q_token, of_k_token)
        names = (of_q, of_k, of_k, *of_tokens, ("kv_heads",), ())
        return ctx.local_map(local, arrays, names, of_q)

    def may_read_in_place(self, ctx: ForwardContext) -> bool:
        """Returns True if kernels here read the parts of a projection in place."""
        return ctx.context_method is None and not any(self.chunks) and may_read_in_place()

    def joined(
        self, products_btknd: jax.Array, bias_knd: jax.Array | None, ctx: ForwardContext
    ) -> jax.Array:
        """Returns what a call with the parts of products + bias does: see `joined_attention`."""
        from pallas_kernels.attention.joined import joined_attention

        layer = self._traced_layer(ctx)

        def local(products, bias, segments, layer):
            def attend(kind):
                window, _ = kind
                before = _before(window, products.shape[1])
                with self._refusals_as_config_errors():
                    return joined_attention(
                        products,
                        bias,
                        causal=self.causal,
                        segment_ids=segments,
                        window=None if before is None else (before, 0),
                        softcap=self.cap,
                        scale=self.scale,
                        implementation=self.implementation,
                    )

            b, t, k, n, d = products.shape
            return by_kind(self._kinds, _number(ctx, layer), attend).reshape(b, t, k, n - 2, d)

        of_slots = OF_QUERIES[2:]
        names = (OF_QUERIES, of_slots, ("batch", "time"), ())
        arrays = (products_btknd, bias_knd, ctx.segment_ids_bt, layer)
        return ctx.local_map(local, arrays, names, OF_QUERIES)

    def _by_ring(self, q_btkgd, k_btkd, v_btke, sinks_h, ctx: ForwardContext) -> jax.Array:
        """Attends to keys that travel round the ring of devices: [b, t, k, g, e]."""
        from spmdtrain.parallel.context.ring import ContextRing, ring_attention

        method = ctx.context_method
        assert method is not None, "keys go round devices"
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
            axes=method.axes,
            ways=method.ways,
            windows=tuple(befores),
            softcap=self.cap,
            scale=self.scale,
            implementation=self.implementation,
        )

        def local(q, k, v, segments, sinks, kind):  # noqa: PLR0913 - the arrays of attention
            q_bthd = q.reshape(*q.shape[:2], -1, q.shape[-1])
            with self._refusals_as_config_errors():
                attended: Any = ring_attention(ring, q_bthd, k, v, segments, kind)
            out, lse = attended
            if sinks is not None:
                out = recomputed(_apply_sinks, ctx)(out, lse, sinks)
            return out.reshape(*q.shape[:-1], v.shape[-1])

        arrays = (q_btkgd, k_btkd, v_btke, ctx.segment_ids_bt, sinks_h, kind)
        names = (OF_QUERIES, OF_KEYS, OF_KEYS, ("batch", "time"), ("kv_heads",), ())
        return ctx.local_map(local, arrays, names, OF_QUERIES)

    def _by_ulysses(self, q_btkgd, k_btkd, v_btke, sinks_h, ctx: ForwardContext) -> jax.Array:
        """Attends on each device to all tokens with a part of the heads: [b, t, k, g, e]."""
        from spmdtrain.parallel.context.ulysses import heads_for_time, own_heads

        method = ctx.context_method
        assert method is not None, "devices exchange heads"
        axes = method.axes

        def local(q, k, v, segments, sinks, layer):  # noqa: PLR0913 - the arrays of attention
            if sinks is not None:
                sinks = own_heads(sinks, axes, method.ways)
            pair = None if segments is None else (segments, segments)
            options = {"segment_ids": pair, "positions": None}

            def attend(q, k, v):
                attend_in_window = partial(self._attend, ctx, q, k, v, sinks, options)
                return by_kind(self._kinds, _number(ctx, layer), attend_in_window)

            return heads_for_time(attend, axes, q, k, v)

        layer = self._traced_layer(ctx)
        arrays = (q_btkgd, k_btkd, v_btke, ctx.segment_ids_bt, sinks_h, layer)
        of_tokens = ("batch", Whole("time"))
        names = (OF_QUERIES, OF_KEYS, OF_KEYS, of_tokens, ("kv_heads",), ())
        return ctx.local_map(local, arrays, names, OF_QUERIES)

    def _blocks(
        self, ctx: ForwardContext, positions_bt: jax.Array, documents_bt: jax.Array | None = None
    ) -> jax.Array:
        """Returns the segments [b, t] that the blocks of this layer are, within documents."""
        from spmdtrain.models.layers.attention.chunks import block_ids

        return block_ids(self.chunks, ctx.layer, positions_bt, documents_bt, self.longest)

    @property
    def _kinds(self) -> tuple[tuple[int, int], ...]:
        """The window of each layer, and the tokens of its blocks."""
        return tuple(zip(self.windows, self.chunks, strict=True))

    def _traced_layer(self, ctx: ForwardContext) -> jax.Array | None:
        """Returns the number of the layer if windows depend on it and it is traced; else None."""
        if len(set(self._kinds)) > 1 and isinstance(ctx.layer, jax.Array):
            return ctx.layer
        return None

    def _attend(  # noqa: PLR0913 - the arrays of attention
        self, ctx, q_btkgd, k_bskd, v_bske, sinks_h, options: dict[str, Any], kind: tuple[int, int]
    ) -> jax.Array:
        """Returns the attention output [b, t, k, g, e] within a window; 0 stands for all tokens.

        `kind`: the window, and the tokens of a block or 0.

        A sink is one more column of the softmax, without a value: the others lose the sink's share,
        and keep sigmoid(lse - sink).
        """
        shape = (*q_btkgd.shape[:-1], v_bske.shape[-1])
        q_bthd = q_btkgd.reshape(*q_btkgd.shape[:2], -1, q_btkgd.shape[-1])
        window, chunk = kind
        before = _before(window, k_bskd.shape[1])
        with self._refusals_as_config_errors(), _counted(chunk, k_bskd.shape[1]):
            attended: Any = attention(
                q_bthd,
                k_bskd,
                v_bske,
                causal=self.causal,
                window=None if before is None else (before, 0),
                softcap=self.cap,
                scale=self.scale,
                return_lse=sinks_h is not None,
                implementation=self.implementation,
                **options,
            )
        if sinks_h is None:
            return attended.reshape(shape)
        return recomputed(_apply_sinks, ctx)(*attended, sinks_h).reshape(shape)

    @contextlib.contextmanager
    def _refusals_as_config_errors(self) -> Iterator[None]:
        """Turns a kernel's refusal within the context into a ConfigError."""
        try:
            yield
        except Refused as refused:
            what = f"model.attention={self.implementation!r} cannot run: {refused.reason}"
            raise ConfigError(what, fix="--set model.attention=auto") from None


def _number(ctx: ForwardContext, layer: jax.Array | None) -> jax.Array | int | None:
    """Returns the number of the layer; `layer` is the traced one of `_traced_layer`."""
    return ctx.layer if layer is None else layer


def _counted(chunk: int, tokens: int) -> contextlib.AbstractContextManager:
    """Returns a context in which attention within blocks counts only the pairs that it sees."""
    if not chunk:
        return contextlib.nullcontext()
    from spmdtrain.models.layers.attention.chunks import share_of_window

    return share_counted(share_of_window(tokens, chunk))


def _before(window: int, tokens: int) -> int | None:
    """Returns how many tokens before its own a query sees; None: all. `window` is a setting."""
    return window - 1 if 0 < window < tokens else None


def _apply_sinks(y_bthd: jax.Array, lse_bth: jax.Array, sinks_h: jax.Array) -> jax.Array:
    """Returns the output of attention after a sink has taken its share of each head's softmax."""
    share_bth = jax.nn.sigmoid(lse_bth - sinks_h)
    return (y_bthd * share_bth[..., None]).astype(y_bthd.dtype)


def make_attend(config: TransformerConfig, *, causal: bool = True) -> Attend:
    """Returns the attention that a model's settings describe."""
    scale = config.score_factor
    if config.latent and scale is None:
        scale = config.head_dim**-0.5  # even if queries are as wide as the latent
    return Attend(
        windows=tuple(kind.window or kind.chunk for kind in config.layer_kinds),
        chunks=tuple(kind.chunk for kind in config.layer_kinds),
        longest=config.max_length or 0,
        scale=scale,
        cap=config.score_cap,
        implementation=None if config.attention == "auto" else config.attention,
        causal=causal,
    )
