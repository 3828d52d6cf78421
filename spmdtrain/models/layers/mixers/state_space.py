"""Defines the mixer of [model.ssd]: the state space of Mamba-2.

Letters as in this room, where a key head is a group: h group, r head of a group, k channel of the
state, v channel of a head.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import SAVED
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import SsdConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mixers.document_starts import find_starts
from spmdtrain.models.layers.mixers.in_front import inputs_in_front, state_in_front
from spmdtrain.models.layers.mixers.initial import drawn_decay_bias, drawn_decay_log, drawn_taps
from spmdtrain.models.layers.mixers.recurrence import Tokens, recur
from spmdtrain.models.layers.mixers.short_convolution import inputs_behind, short_convolution
from spmdtrain.models.layers.norm import rms_normed
from spmdtrain.models.layers.recurrent_cache import RecurrentCache
from spmdtrain.models.layers.weights import hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import FullPrecision, Fused
from spmdtrain.models.scaled import scaled
from spmdtrain.parallel.context.sequence_pieces import Pieces, on_pieces
from spmdtrain.parallel.regions import Whole

TOKEN = ("batch", "time")  # logical axes


class SsdMixer(nnx.Module):
    """The state-space duality of Mamba-2 (arXiv:2405.21060) behind a short convolution.

    One projection makes gates, values and times of each head, one the keys and queries of each
    group. `tensor` splits groups with their heads, or the heads of a single group: then every
    device has its keys and queries, and its norm is a mean over devices.
    """

    any_order = True  # it knows the order in which a mesh has the tokens
    keeps_cache = True  # with a cache, new tokens get the results of a pass over all tokens

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        ssd = config.ssd
        assert ssd is not None, "a model with [model.ssd]"
        self.ssd: SsdConfig = ssd
        self.epsilon = ssd.epsilon or config.norm_epsilon
        of_heads, of_groups, split = _head_axes(ssd)
        heads = (ssd.groups, ssd.group)
        std = hidden_std(config)
        # Of each head its gate, its values, and the time of the token.
        fused = Fused((ssd.head_dim, ssd.head_dim, 1))
        shape, axes = (config.embed, *heads, sum(fused.sizes)), ("embed", *of_heads, "head_dim")
        self.zxt_ehrn = matmul_weight(rngs, shape, axes, std, fused=fused)
        # Of each group its keys, then its queries: B and C of the paper.
        fused = Fused((ssd.state, ssd.state))
        shape, axes = (config.embed, ssd.groups, sum(fused.sizes)), ("embed", of_groups, "head_dim")
        self.kq_ehn = matmul_weight(rngs, shape, axes, std, fused=fused)
        of_values = (*of_heads, "head_dim")
        self.taps_hrvw = drawn_taps(rngs, (*heads, ssd.head_dim, ssd.taps), of_values)
        of_shared = (of_groups, "head_dim")
        self.taps_hnw = drawn_taps(rngs, (ssd.groups, 2 * ssd.state, ssd.taps), of_shared)
        of_value = _zeros((*heads, ssd.head_dim), of_values)
        of_group = _zeros((ssd.groups, 2 * ssd.state), of_shared)
        self.taps_bias_hrv = of_value if ssd.taps_bias else None
        self.taps_bias_hn = of_group if ssd.taps_bias else None
        self.decay_log = drawn_decay_log(rngs, ssd.heads, split)
        self.time_bias = drawn_decay_bias(rngs, ssd.heads, split)
        self.skip = FullPrecision(jnp.ones(ssd.heads), out_sharding=(split,))
        inner = ssd.heads * ssd.head_dim
        scale = nnx.Param(jnp.ones(inner), out_sharding=(split,))
        self.norm_scale = scale if ssd.norm == "group" else None
        out_std = std * (2 * config.layers) ** -0.5
        out_shape = (*heads, ssd.head_dim, config.embed)
        self.out_hrve = matmul_weight(rngs, out_shape, (*of_values, "embed"), out_std)

    @part("attention")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache | None]:
        ssd = self.ssd
        of_heads, of_groups, split = _head_axes(ssd)
        axes = _axes(ssd)
        x_bte = scaled(x_bte, ssd.in_factor)
        own = ctx.column_parallel(x_bte, self.zxt_ehrn, (*of_heads, "head_dim"))
        gate, value, time = jnp.split(own, [ssd.head_dim, 2 * ssd.head_dim], -1)
        shared = ctx.column_parallel(x_bte, self.kq_ehn, (of_groups, "head_dim"))
        biases = (self.taps_bias_hrv, self.taps_bias_hn)
        of_value, of_shared = (None if x is None else x[...] for x in biases)
        inputs = SsdInputs(
            value=value,
            shared=shared,
            time=time[..., 0],
            taps_of_value=self.taps_hrvw[...],
            taps_of_shared=self.taps_hnw[...],
            bias_of_value=of_value,
            bias_of_shared=of_shared,
            decay_log=self.decay_log[...],
            time_bias=self.time_bias[...],
            skip=self.skip[...],
            segments=ctx.segment_ids_bt if cache is None else None,
            state=None if cache is None else cache.state_bhrkv,
            tail_of_value=None if cache is None else cache.tails[0],
            tail_of_shared=None if cache is None else cache.tails[1],
        )
        mixed = partial(recomputed(_mixed, ctx, static_argnums=(0, 1)), ssd)
        out = (axes.value,)
        if cache is not None:
            out = (axes.value, axes.state, axes.tail_of_value, axes.tail_of_shared)
        local = on_pieces(ctx.context_method, mixed, axes, out, heads=split)
        y, *grown = ctx.local_map(local, inputs, axes, out)
        y = self._gated(checkpoint_name(y, SAVED), gate, ctx)
        y = ctx.row_parallel(y, self.out_hrve, (*of_heads, "head_dim"))
        y = scaled(y, ssd.out_factor)
        return y, RecurrentCache(grown[0], tuple(grown[1:])) if grown else None

    def _gated(self, y: jax.Array, gate: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns y [b, t, h, r, v] times its gate, with the norm of each group."""
        gate = jax.nn.silu(gate.astype(jnp.float32) * self.ssd.factors[0])
        wide = y.astype(jnp.float32)
        if self.norm_scale is None:
            return (wide * gate).astype(y.dtype)
        scale = self.norm_scale[...].astype(jnp.float32).reshape(y.shape[2:])
        normed = partial(rms_normed, scale=scale, dims=(3, 4), epsilon=self.epsilon, ctx=ctx)
        product = normed(wide) * gate if self.ssd.norm_first else normed(wide * gate)
        return product.astype(y.dtype)


def _zeros(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=axes)


class HeadAxes(NamedTuple):
    """The logical axes of heads [h, r], of what a group shares [h], and of whichever is split."""

    of_heads: tuple[str | None, str | None]
    of_groups: str | None
    split: str


def _head_axes(ssd: SsdConfig) -> HeadAxes:
    """Returns axes that split groups with their heads, or the heads of a single group."""
    if ssd.groups == 1:
        return HeadAxes((None, "heads"), None, "heads")
    return HeadAxes(("kv_heads", None), "kv_heads", "kv_heads")


class SsdInputs(NamedTuple):
    """The arrays of the part between the projections, on a device those of its own heads."""

    value: Any  # [b, t, h, r, v]
    shared: Any  # [b, t, h, n]: keys, then queries
    time: Any  # [b, t, h, r]
    taps_of_value: Any  # [h, r, v, w]
    taps_of_shared: Any  # [h, n, w]
    bias_of_value: Any  # [h, r, v]; None: without
    bias_of_shared: Any  # [h, n]; None: without
    decay_log: Any  # [h r]
    time_bias: Any  # [h r]
    skip: Any  # [h r]
    segments: Any  # [b, all tokens]; None: one document
    state: Any  # [b, h, r, k, v]; None: without a cache
    tail_of_value: Any  # [b, w - 1, h, r, v]; None: without a cache
    tail_of_shared: Any  # [b, w - 1, h, n]; None: without a cache


def _axes(ssd: SsdConfig) -> SsdInputs:
    """Returns the logical axes of `SsdInputs`."""
    of_heads, of_groups, split = _head_axes(ssd)
    of_values, of_shared = (*of_heads, "head_dim"), (of_groups, "head_dim")
    return SsdInputs(
        value=(*TOKEN, *of_values),
        shared=(*TOKEN, *of_shared),
        time=(*TOKEN, *of_heads),
        taps_of_value=(*of_values, None),
        taps_of_shared=(*of_shared, None),
        bias_of_value=of_values,
        bias_of_shared=of_shared,
        decay_log=(split,),
        time_bias=(split,),
        skip=(split,),
        segments=("batch", Whole("time")),
        state=("batch", *of_heads, None, None),
        tail_of_value=("batch", None, *of_values),
        tail_of_shared=("batch", None, *of_shared),
    )


def _mixed(ssd: SsdConfig, pieces: Pieces, *arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns the output [b, t, h, r, v] of `SsdInputs`; with a cache also what it becomes."""
    x = SsdInputs(*arrays)
    dtype = x.value.dtype
    _, of_value, of_key, of_query, of_time = ssd.factors
    of_shared = jnp.repeat(jnp.array([of_key, of_query], jnp.float32), ssd.state)
    value = pieces.split(scaled(x.value, of_value))
    shared = pieces.split(scaled(x.shared, of_shared))
    documents = find_starts(pieces, x.segments, value, ssd.taps - 1)
    has_cache = x.state is not None

    def convolved(inputs, taps, bias, tail) -> tuple[jax.Array, jax.Array]:
        """Returns the silu of the convolution, and the inputs in front of it."""
        before = tail if has_cache else inputs_in_front(pieces, inputs, documents)
        y = short_convolution(inputs, taps, documents.starts_bt, before)
        if bias is not None:
            y = y + bias.astype(jnp.float32)
        return jax.nn.silu(y), before

    v, in_front = convolved(value, x.taps_of_value, x.bias_of_value, x.tail_of_value)
    kq, in_front_of_shared = convolved(shared, x.taps_of_shared, x.bias_of_shared, x.tail_of_shared)
    k, q = jnp.split(kq, 2, -1)
    heads = value.shape[2:4]
    time = pieces.split(x.time).astype(jnp.float32) * of_time + x.time_bias.reshape(heads)
    time = jnp.clip(jax.nn.softplus(time), ssd.smallest_step, ssd.largest_step)
    tokens = Tokens(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=v.astype(dtype),
        log_decay=(-jnp.exp(x.decay_log.reshape(heads)) * time)[..., None],
        rate=time,
        starts=documents.starts_bt,
    )
    state = x.state if has_cache else state_in_front(pieces, tokens, corrects=False)
    o, state = recur(tokens, state, corrects=False)
    y = (o + x.skip.reshape(*heads, 1) * v).astype(dtype)
    y = pieces.join(y)
    if not has_cache:
        return (y,)
    return y, state, inputs_behind(value, in_front), inputs_behind(shared, in_front_of_shared)
