"""Defines the mixer of [model.delta]: the gated delta rule and Kimi Delta Attention.

Letters in addition to those of this room: l the width between two projections.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import SAVED
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import DeltaConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mixers.document_starts import find_starts
from spmdtrain.models.layers.mixers.in_front import inputs_in_front, state_in_front
from spmdtrain.models.layers.mixers.initial import drawn_decay_bias, drawn_decay_log, drawn_taps
from spmdtrain.models.layers.mixers.recurrence import Tokens, recur
from spmdtrain.models.layers.mixers.short_convolution import (
    inputs_behind,
    short_convolution,
)
from spmdtrain.models.layers.recurrent_cache import RecurrentCache
from spmdtrain.models.layers.weights import INIT_STD, hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import Fused
from spmdtrain.parallel.context.sequence_pieces import Pieces, on_pieces
from spmdtrain.parallel.regions import Whole

UNIT_EPSILON = 1e-6  # added to the sum of squares of a query or key
# Logical axes.
OF_KEY_HEADS = ("kv_heads", "head_dim")
OF_VALUES = ("kv_heads", None, "head_dim")
TOKEN = ("batch", "time")


class DeltaMixer(nnx.Module):
    """The gated delta rule (arXiv:2412.06464) behind a short convolution, with a gated norm.

    One fused projection makes query, key, values and gates of each key head: the slots of a head
    lie together, so that `tensor` splits key heads with their value heads. With `gate_rank` gates
    have two projections of their own, and so have decays of channels. Decays and rates are computed
    in float32.
    """

    any_order = True  # it knows the order in which a mesh has the tokens
    keeps_cache = True  # with a cache, new tokens get the results of a pass over all tokens

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        delta = config.delta
        assert delta is not None, "a model with [model.delta]"
        self.delta: DeltaConfig = delta
        self.epsilon = delta.epsilon or config.norm_epsilon
        heads, group = delta.key_heads, delta.group
        of_gate = group * delta.value_dim
        std = hidden_std(config)
        narrow_gate, narrow_decay = None, None
        if delta.gate_rank is not None:
            narrow_gate = NarrowProjection(config, rngs, delta.gate_rank, (heads, of_gate))
        if delta.decay == "channel":
            rank = delta.decay_rank or delta.key_dim
            narrow_decay = NarrowProjection(config, rngs, rank, (heads, group * delta.key_dim))
        self.narrow_gate, self.narrow_decay = narrow_gate, narrow_decay
        of_qkv = delta.mixed_widths
        fused = Fused(of_qkv if narrow_gate else (*of_qkv, of_gate))
        shape, axes = (config.embed, heads, sum(fused.sizes)), ("embed", *OF_KEY_HEADS)
        self.qkvz_ehn = matmul_weight(rngs, shape, axes, std, fused=fused)
        # The rates of the value heads of a key head, then their decays.
        fused = Fused((group,) if narrow_decay else (group, group))
        shape, axes = (config.embed, heads, sum(fused.sizes)), ("embed", "kv_heads", None)
        self.rates_ehn = matmul_weight(rngs, shape, axes, std, fused=fused)
        self.taps_hnw = drawn_taps(rngs, (heads, delta.mixed_width, delta.taps), OF_KEY_HEADS)
        # In the order of the value heads: those of a key head follow each other.
        self.decay_log = drawn_decay_log(rngs, delta.value_heads)
        channels = delta.key_dim if narrow_decay else 1
        self.decay_bias = drawn_decay_bias(rngs, delta.value_heads * channels)
        self.norm_scale_v = nnx.Param(jnp.ones(delta.value_dim), out_sharding=("norm",))
        out_std = std * (2 * config.layers) ** -0.5
        out_shape = (heads, group, delta.value_dim, config.embed)
        self.out_hrve = matmul_weight(rngs, out_shape, (*OF_VALUES, "embed"), out_std)

    @part("attention")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache | None]:
        delta = self.delta
        qkvz = ctx.column_parallel(x_bte, self.qkvz_ehn, OF_KEY_HEADS)
        qkv, gate = jnp.split(qkvz, [delta.mixed_width], -1)
        rates = ctx.column_parallel(x_bte, self.rates_ehn, ("kv_heads", None))
        rate, decay = jnp.split(rates, [delta.group], -1)
        if self.narrow_gate is not None:
            gate = self.narrow_gate(x_bte, ctx)
        if self.narrow_decay is not None:
            decay = self.narrow_decay(x_bte, ctx)
        by_value_head = (*x_bte.shape[:2], delta.key_heads, delta.group, -1)
        inputs = DeltaInputs(
            qkv=qkv,
            rate=rate,
            decay=decay.reshape(by_value_head),
            gate=gate.reshape(by_value_head),
            taps=self.taps_hnw[...],
            decay_log=self.decay_log[...],
            decay_bias=self.decay_bias[...],
            norm_scale=self.norm_scale_v[...].astype(jnp.float32),
            segments=ctx.segment_ids_bt if cache is None else None,
            state=None if cache is None else cache.state_bhrkv,
            tail=None if cache is None else cache.tails[0],
        )
        mixed = partial(recomputed(_mixed, ctx, static_argnums=(0, 1, 2)), delta, self.epsilon)
        out = (AXES.gate,) if cache is None else (AXES.gate, AXES.state, AXES.tail)
        local = on_pieces(ctx.context_method, mixed, AXES, out)
        y, *grown = ctx.local_map(local, inputs, AXES, out)
        y = ctx.row_parallel(checkpoint_name(y, SAVED), self.out_hrve, OF_VALUES)
        return y, RecurrentCache(grown[0], (grown[1],)) if grown else None


class NarrowProjection(nnx.Module):
    """Two projections from the stream to the channels of each key head, with few numbers between.

    `shape`: h, n.
    """

    any_order = True

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, rank: int, shape: tuple[int, int]
    ):
        std = hidden_std(config)
        self.down_el = matmul_weight(rngs, (config.embed, rank), ("embed", "rank"), std)
        of_up = ("rank", *OF_KEY_HEADS)
        self.up_lhn = matmul_weight(rngs, (rank, *shape), of_up, INIT_STD)

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        low_btl = ctx.column_parallel(x_bte, self.down_el, (None,))
        return ctx.column_parallel(low_btl, self.up_lhn, OF_KEY_HEADS)


class DeltaInputs(NamedTuple):
    """The arrays of the part between the projections, on a device those of its own heads."""

    qkv: Any  # [b, t, h, n]: query, key, then the values of a key head
    rate: Any  # [b, t, h, r]
    decay: Any  # [b, t, h, r, k or 1]
    gate: Any  # [b, t, h, r, v]
    taps: Any  # [h, n, w]
    decay_log: Any  # [h r]
    decay_bias: Any  # [h r k], or 1 in place of k
    norm_scale: Any  # [v]
    segments: Any  # [b, all tokens]; None: one document
    state: Any  # [b, h, r, k, v]; None: without a cache
    tail: Any  # [b, w - 1, h, n]; None: without a cache


AXES = DeltaInputs(
    qkv=(*TOKEN, *OF_KEY_HEADS),
    rate=(*TOKEN, "kv_heads", None),
    decay=(*TOKEN, *OF_VALUES),
    gate=(*TOKEN, *OF_VALUES),
    taps=(*OF_KEY_HEADS, None),
    decay_log=("kv_heads",),
    decay_bias=("kv_heads",),
    norm_scale=(None,),
    segments=("batch", Whole("time")),
    state=("batch", "kv_heads", None, None, None),
    tail=("batch", None, *OF_KEY_HEADS),
)


def _mixed(
    delta: DeltaConfig, epsilon: float, pieces: Pieces, *arrays: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns the gated output [b, t, h, r, v]; with a cache also what it becomes."""
    x = DeltaInputs(*arrays)
    dtype = x.qkv.dtype
    qkv, rate, decay = map(pieces.split, (x.qkv, x.rate, x.decay))
    documents = find_starts(pieces, x.segments, qkv, delta.taps - 1)
    before = inputs_in_front(pieces, qkv, documents) if x.tail is None else x.tail
    convolved = jax.nn.silu(short_convolution(qkv, x.taps, documents.starts_bt, before))
    q, k, v = jnp.split(convolved, [delta.key_dim, 2 * delta.key_dim], -1)
    step = jax.nn.softplus(decay.astype(jnp.float32) + x.decay_bias.reshape(decay.shape[2:]))
    log_decay = -jnp.exp(x.decay_log.reshape(*step.shape[2:4], 1)) * step
    tokens = Tokens(
        q=(_unit(q) * delta.key_dim**-0.5).astype(dtype),
        k=_unit(k).astype(dtype),
        v=v.reshape(*v.shape[:-1], delta.group, delta.value_dim).astype(dtype),
        log_decay=log_decay,
        rate=delta.rate * jax.nn.sigmoid(rate.astype(jnp.float32)),
        starts=documents.starts_bt,
    )
    state = state_in_front(pieces, tokens, corrects=True) if x.state is None else x.state
    o, state = recur(tokens, state, corrects=True)
    y = _gated(delta, epsilon, pieces.join(o), x).astype(dtype)
    return (y,) if x.tail is None else (y, state, inputs_behind(qkv, before))


def _unit(x: jax.Array) -> jax.Array:
    """Returns x divided by its length along the last dim."""
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + UNIT_EPSILON)


def _gated(delta: DeltaConfig, epsilon: float, o: jax.Array, x: DeltaInputs) -> jax.Array:
    """Returns the RMSNorm of o [b, t, h, r, v] over its channels, then times the gate: float32."""
    o = o.astype(jnp.float32)
    normed = o * jax.lax.rsqrt((o * o).mean(-1, keepdims=True) + epsilon) * x.norm_scale
    activation = jax.nn.silu if delta.gate == "silu" else jax.nn.sigmoid
    return normed * activation(x.gate.astype(jnp.float32))
