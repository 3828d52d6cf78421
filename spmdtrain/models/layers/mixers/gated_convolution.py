"""Defines the mixer of [model.conv]: a short convolution between two gates.

Letters in addition to those of this room: c channel.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.schema import ConvConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.mixers.document_starts import find_starts
from spmdtrain.models.layers.mixers.in_front import inputs_in_front
from spmdtrain.models.layers.mixers.initial import drawn_taps
from spmdtrain.models.layers.mixers.short_convolution import inputs_behind, short_convolution
from spmdtrain.models.layers.recurrent_cache import RecurrentCache
from spmdtrain.models.layers.weights import bias, hidden_std, matmul_weight, recomputed
from spmdtrain.models.projection import Fused
from spmdtrain.parallel.context.sequence_pieces import Pieces, on_pieces
from spmdtrain.parallel.regions import Whole

CHANNELS = "channels"  # logical axis


class ConvMixer(nnx.Module):
    """C * conv(B * x) of three projections of the stream (LFM2, arXiv:2511.23404)."""

    any_order = True  # it knows the order in which a mesh has the tokens
    keeps_cache = True  # with a cache, new tokens get the results of a pass over all tokens

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        conv = config.conv
        assert conv is not None, "a model with [model.conv]"
        self.conv: ConvConfig = conv
        width = config.embed
        std = hidden_std(config)
        # B, C, and x.
        shape, axes = (width, 3, width), ("embed", None, CHANNELS)
        self.in_e3c = matmul_weight(rngs, shape, axes, std, fused=Fused((1, 1, 1), dim=-2))
        self.taps_cw = drawn_taps(rngs, (width, conv.taps), (CHANNELS,))
        out_std = std * (2 * config.layers) ** -0.5
        self.out_ce = matmul_weight(rngs, (width, width), (CHANNELS, "embed"), out_std)
        has_bias = conv.bias
        in_bias = nnx.Param(jnp.zeros((3, width)), out_sharding=(None, CHANNELS))
        self.in_bias_3c = in_bias if has_bias else None
        self.taps_bias_c = bias(width, CHANNELS) if has_bias else None
        self.out_bias = bias(width, "norm") if has_bias else None

    @part("attention")
    def __call__(
        self, x_bte: jax.Array, ctx: ForwardContext, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache | None]:
        parts = ctx.column_parallel(x_bte, self.in_e3c, (None, CHANNELS))
        if self.in_bias_3c is not None:
            parts = parts + self.in_bias_3c[...]
        inputs = ConvInputs(
            parts=parts,
            taps=self.taps_cw[...],
            bias=None if self.taps_bias_c is None else self.taps_bias_c[...],
            segments=ctx.segment_ids_bt if cache is None else None,
            tail=None if cache is None else cache.tails[0],
        )
        mixed = partial(recomputed(_mixed, ctx, static_argnums=(0, 1)), self.conv.taps)
        of_y = ("batch", "time", CHANNELS)
        out = (of_y,) if cache is None else (of_y, AXES.tail)
        local = on_pieces(ctx.context_method, mixed, AXES, out, heads=CHANNELS)
        y, *tails = ctx.local_map(local, inputs, AXES, out)
        y = ctx.row_parallel(y, self.out_ce, (CHANNELS,))
        if self.out_bias is not None:
            y = y + self.out_bias[...]
        return y, None if cache is None else RecurrentCache(None, tuple(tails))


class ConvInputs(NamedTuple):
    """The arrays of the part between the projections, on a device those of its own channels."""

    parts: Any  # [b, t, 3, c]: B, C, x
    taps: Any  # [c, w]
    bias: Any  # [c]; None: without
    segments: Any  # [b, all tokens]; None: one document
    tail: Any  # [b, w - 1, c]; None: without a cache


AXES = ConvInputs(
    parts=("batch", "time", None, CHANNELS),
    taps=(CHANNELS, None),
    bias=(CHANNELS,),
    segments=("batch", Whole("time")),
    tail=("batch", None, CHANNELS),
)


def _mixed(taps: int, pieces: Pieces, *arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    """Returns the output [b, t, c] of `ConvInputs`; with a cache also what the tail becomes."""
    x = ConvInputs(*arrays)
    dtype = x.parts.dtype
    before_gate, after_gate, value = (part[:, :, 0] for part in jnp.split(x.parts, 3, 2))
    gated = pieces.split(before_gate * value)
    documents = find_starts(pieces, x.segments, gated, taps - 1)
    before = inputs_in_front(pieces, gated, documents) if x.tail is None else x.tail
    convolved = short_convolution(gated, x.taps, documents.starts_bt, before)
    if x.bias is not None:
        convolved = convolved + x.bias.astype(jnp.float32)
    y = (pieces.join(convolved) * after_gate.astype(jnp.float32)).astype(dtype)
    return (y,) if x.tail is None else (y, inputs_behind(gated, before))
