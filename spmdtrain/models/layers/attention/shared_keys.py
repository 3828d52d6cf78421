"""Defines attention of a model whose last layers read the keys and values of earlier ones."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.grouped import OF_HEADS, Attention
from spmdtrain.models.layers.attention.idle_keys import IdleKeys
from spmdtrain.models.layers.attention.own_values import OwnValues
from spmdtrain.models.layers.norm import norm_scale, rms_normed

SHARED = "shared_keys"  # what layers read of `ForwardContext.read`: see `SharedKeys`


class SharedKeys(NamedTuple):
    """The keys and values of a layer, after their norms and rotation, or its cache of them."""

    k_bskd: jax.Array
    v_bske: jax.Array
    cache: Any = None


class KeepingKeys(OwnValues):
    """Attention that returns its keys and values in place of a cache."""

    any_order = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride] - its parent's property is true as well

    @part("attention")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        """Returns what attention adds to the stream, and `SharedKeys`."""
        q, k, v, gate = self._heads(self._project(x_bte, ctx), ctx)
        if cache is not None:
            cache = cache.extended(k, v)
            k, v = cache.k_bskd, cache.v_bskd
        return self._back(q, k, v, gate, ctx, cache), SharedKeys(k, v, cache)


class SharingKeys(Attention):
    """Attention without keys and values: those of an earlier layer are in the context."""

    any_order = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride] - as above

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, projects="q")
        has_norm = config.query_norm == "head"
        self.query_key_norm = QueryNorm(config) if has_norm else None
        self.idle = IdleKeys(config) if config.idle_keys else None

    @part("attention")
    def __call__(
        self,
        x_bte: jax.Array,
        ctx: ForwardContext,
        cache: Any = None,  # noqa: ARG002 - the earlier layer has it
    ) -> tuple[jax.Array, Any]:
        """Returns what attention adds to the stream."""
        keys: SharedKeys = ctx.read[SHARED]
        q = self._project(x_bte, ctx)
        if (bias_knd := self._bias(q)) is not None:
            q = q + bias_knd
        q = ctx.constrain(q, "batch", "time", *OF_HEADS)
        if self.query_key_norm is not None:
            q = self.query_key_norm(q, ctx)
        if self.rotation is not None:
            q = self.rotation(q, ctx.positions_bt, ctx.layer)
        if self.temperature is not None:
            q = self.temperature(q, ctx)
        return self._back(q, keys.k_bskd, keys.v_bske, None, ctx, keys.cache), None


class QueryNorm(nnx.Module):
    """The RMSNorm of each head of queries alone."""

    any_order = True

    def __init__(self, config: TransformerConfig):
        self.epsilon, self.offset = config.norm_epsilon, config.norm_offset
        self.query_scale = norm_scale(config, config.head_dim, "head_dim")

    def __call__(self, q_btkgd: jax.Array, ctx: ForwardContext) -> jax.Array:
        scale = self.query_scale[...].astype("float32") + self.offset
        return rms_normed(q_btkgd, scale, (4,), self.epsilon, ctx)
