"""Defines grouped-query attention: one projection to queries, keys and values, and one back."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.bias import biased_heads
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.attention.attend import make_attend
from spmdtrain.models.layers.attention.temperature import make_temperature
from spmdtrain.models.layers.cache import Cache
from spmdtrain.models.layers.norm import QueryKeyNorm
from spmdtrain.models.layers.rope import make_rotation
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight, recomputed

Position = Callable[[jax.Array, jax.Array], jax.Array]
# Queries [b, t, k, g, d], keys and values [b, t, k, d], and gates of channels like queries, if any.
Heads = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
OF_HEADS = ("kv_heads", None, "head_dim")  # logical axes
OF_GATES = ("kv_heads", None)


class Attention(nnx.Module):
    """Grouped-query attention within segments: to earlier tokens, or without `causal` to all.

    One fused projection makes queries, keys and values. `position(x_btkgd, positions_bt)` marks
    queries and keys with the position of their token; default: the rotary settings of `model`. The
    window and the rotation of a layer follow from its number, `ctx.layer`. `projects`: of "qkv",
    what the layer projects the stream to; a class that leaves some out has its own `_project`.
    """

    keeps_cache = True  # with a cache, new tokens get the results of a pass over all tokens

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        *,
        position: Position | None = None,
        causal: bool = True,
        projects: Literal["qkv", "qk", "q"] = "qkv",
    ):
        for name in ("windows", "chunks"):
            if any(getattr(config, name)) and not causal:
                what = f"model.{name} counts earlier tokens; attention here is not causal"
                raise ConfigError(what, fix=f"--set model.{name}=[]")
        self.position = position
        self.causal = causal
        self.rotation = make_rotation(config)
        temperature = config.temperature
        self.temperature = make_temperature(temperature, config) if temperature else None
        self.attend = make_attend(config, causal=causal)
        self.heads = config.kv_heads
        self.group = config.heads // self.heads
        # The slots of a key-value head: its group of query heads, each with the gates of its
        # channels behind it if there are any; its keys; its values.
        self.has_gates = config.output_gate == "channel"
        self.query_slots = self.group * (2 if self.has_gates else 1)
        slots = self.query_slots + len(projects) - 1
        qkv_shape = (config.embed, self.heads, slots, config.head_dim)
        out_shape = (self.heads, self.group, config.head_dim, config.embed)
        std = hidden_std(config)
        out_std = std * (2 * config.layers) ** -0.5
        qkv_axes = ("embed", "kv_heads", None, "head_dim")
        self.projection = f"{projects}_eknd"
        setattr(self, self.projection, matmul_weight(rngs, qkv_shape, qkv_axes, std))
        gate_shape, gate_axes = (config.embed, self.heads, self.group), ("embed", *OF_GATES)
        by_head = config.output_gate == "head"
        self.gate_ekg = matmul_weight(rngs, gate_shape, gate_axes, std) if by_head else None
        out_axes = ("kv_heads", None, "head_dim", "embed")
        self.out_kgde = matmul_weight(rngs, out_shape, out_axes, out_std)
        qkv_width = self.heads * slots * config.head_dim
        self.biases = f"{projects}_bias"
        setattr(self, self.biases, bias(qkv_width, "kv_heads") if config.qkv_bias else None)
        self.out_bias = bias(config.embed, "norm") if config.out_bias else None
        has_weights = config.query_norm in ("head", "all")
        self.query_key_norm = QueryKeyNorm(config) if has_weights else None
        self.rotated_norm = _rotated_norm(config) if config.query_norm == "after" else None
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
        products = self._project(x_bte, ctx)
        if cache is None and self._reads_in_place(ctx):
            joined = self.attend.joined(products, self._bias(products), ctx)
            return self._out(joined, None, ctx), None
        q, k, v, gate = self._heads(products, ctx)
        if self.gate_ekg is not None:
            gate_btkg = ctx.column_parallel(x_bte, self.gate_ekg, OF_GATES)
            gate = ctx.constrain(gate_btkg, "batch", "time", *OF_GATES)[..., None]
        if cache is not None:
            if not self.causal:
                what = "a key-value cache holds earlier tokens, but this attention is not causal"
                raise ConfigError(what, fix="Attention(causal=True)")
            cache = cache.extended(k, v)
            k = cache.k_bskd
            v = cache.v_bskd
        return self._back(q, k, v, gate, ctx, cache), cache

    def _back(  # noqa: PLR0913 - the arrays of attention
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gate: jax.Array | None,
        ctx: ForwardContext,
        cache: Cache | None,
    ) -> jax.Array:
        """Returns what attention adds to the stream, [b, t, e]."""
        sinks = None if self.sinks is None else self.sinks[...]
        return self._out(self.attend(q, k, v, ctx, cache=cache, sinks=sinks), gate, ctx)

    def _out(self, attended: jax.Array, gate: jax.Array | None, ctx: ForwardContext) -> jax.Array:
        attended = ctx.constrain(attended, "batch", "time", *OF_HEADS)
        if gate is not None:
            attended = recomputed(_gated, ctx)(attended, gate)
        y = ctx.row_parallel(attended, self.out_kgde, OF_HEADS)
        if self.out_bias is not None:
            y = y + self.out_bias[...]
        return y

    def _project(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns the slots of each key-value head [b, t, k, n, d], before biases."""
        return ctx.column_parallel(x_bte, getattr(self, self.projection), OF_HEADS)

    def _stays(self, ctx: ForwardContext) -> bool:
        """Returns True if queries, keys and values are the products and their biases."""
        changes = self.query_key_norm, self.temperature, self.rotated_norm, self._position(ctx)
        return not self.has_gates and all(change is None for change in changes)

    def _position(self, ctx: ForwardContext) -> Position | None:
        if self.position is None and self.rotation is not None:
            return partial(self.rotation, number=ctx.layer)
        return self.position

    def _reads_in_place(self, ctx: ForwardContext) -> bool:
        """Returns True if attention may take the products as they are, without a cache."""
        takes_more = self.sinks is not None or self.gate_ekg is not None
        return self._stays(ctx) and not takes_more and self.attend.may_read_in_place(ctx)

    def _bias(self, slots_btknd: jax.Array) -> jax.Array | None:
        """Returns the biases of the slots of a key-value head [k, n, d]; None: there are none."""
        of_slots = getattr(self, self.biases)
        if of_slots is None:
            return None
        return of_slots[...].reshape(self.heads, -1, slots_btknd.shape[-1])

    def _heads(self, qkv_btknd: jax.Array, ctx: ForwardContext) -> Heads:
        """Returns queries and keys, normed and rotated, values, and gates if there are any.

        They are split, not indexed: their gradients are then put side by side, and not each padded
        to the whole and added.
        """
        position = self._position(ctx)
        bias_knd = self._bias(qkv_btknd)
        if bias_knd is not None:
            if self._stays(ctx):
                of_keys = ("batch", "time", "kv_heads", "head_dim")
                names = ("batch", "time", *OF_HEADS), OF_HEADS
                out = names[0], of_keys, of_keys
                return *ctx.local_map(biased_heads, (qkv_btknd, bias_knd), names, out), None
            # As a vector: XLA would write a bias of several dims out for each token.
            wide = qkv_btknd.reshape(*qkv_btknd.shape[:2], -1) + bias_knd.reshape(-1)
            qkv_btknd = wide.reshape(qkv_btknd.shape)
        qkv_btknd = ctx.constrain(qkv_btknd, "batch", "time", *OF_HEADS)
        gate = None
        if self.has_gates:
            q, gate, kv = self._without_gates(qkv_btknd)
            k, v = jnp.split(kv, [1], -2)
            qk = jnp.concatenate((q, k), -2)
        else:
            qk, v = jnp.split(qkv_btknd, [self.group + 1], -2)
        if self.query_key_norm is not None:
            qk = self.query_key_norm(qk, ctx)
        if position is not None:
            qk = position(qk, ctx.positions_bt)
        if self.rotated_norm is not None:
            qk = self.rotated_norm(qk, ctx)
        q, k = jnp.split(qk, [self.group], -2)
        if self.temperature is not None:
            q = self.temperature(q, ctx)
        return q, jnp.squeeze(k, -2), jnp.squeeze(v, -2), gate

    def _without_gates(self, qkv_btknd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries and their gates [b, t, k, g, d], and the slots of keys and values."""
        gated, kv = jnp.split(qkv_btknd, [self.query_slots], -2)
        pairs = gated.reshape(*gated.shape[:-2], self.group, 2, gated.shape[-1])
        q, gate = (jnp.squeeze(half, -2) for half in jnp.split(pairs, 2, -2))
        return q, gate, kv


def _rotated_norm(config: TransformerConfig) -> Callable[..., jax.Array]:
    from spmdtrain.models.layers.attention.rotated_norm import make_rotated_norm

    return make_rotated_norm(config)


def _gated(attended_btkgd: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns the output of attention times the sigmoid of gates [b, t, k, g, d or 1]."""
    share = jax.nn.sigmoid(gate.astype(jnp.float32))
    return (attended_btkgd * share).astype(attended_btkgd.dtype)
