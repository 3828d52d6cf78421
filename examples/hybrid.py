"""A hybrid model: gated linear recurrences, and attention in every third block.

    spmdtrain train examples/hybrid.toml --simulate-devices 8
    spmdtrain sample runs/hybrid --make examples/hybrid.py:Hybrid

The config names this file, and its table [model.extra] holds the settings of `Settings`. Letters:
b batch, t time, e embed, s state.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config import RunConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers import weight
from spmdtrain.models.stack import Stack
from spmdtrain.models.transformer import Block, Transformer
from spmdtrain.parallel.axes import STREAM


@dataclass(frozen=True)
class Settings:
    """The settings of [model.extra]."""

    every: int = 3  # one block in this many has attention
    state: int = 128  # channels of the recurrence
    remember: float = 2.0  # the first bias of its gate: how long it remembers, untrained


class Recurrence(nnx.Module):
    """The recurrence h = keep * previous h + (1 - keep) * value, channel by channel.

    It takes the place of attention.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, settings: Settings):
        width = config.embed
        self.in_e3s = weight(rngs, (width, 3, settings.state), ("embed", None, "state"))
        self.remember_s = nnx.Param(
            jnp.full(settings.state, settings.remember), out_sharding=("state",)
        )
        self.out_se = weight(rngs, (settings.state, width), ("state", "embed"))

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext, cache=None):
        x_bt3s = jnp.einsum("bte,eks->btks", x_bte, self.in_e3s[...])
        x_bt3s = ctx.constrain(x_bt3s, "batch", "time", None, "state").astype(jnp.float32)
        value, keep, gate = x_bt3s[:, :, 0], x_bt3s[:, :, 1], x_bt3s[:, :, 2]
        keep = jax.nn.sigmoid(keep + self.remember_s[...])
        keep = jnp.where(ctx.positions_bt[..., None] == 0, 0, keep)  # a document starts afresh

        def after(first, second):  # joins two stretches of time
            (keep_1, state_1), (keep_2, state_2) = first, second
            return keep_1 * keep_2, state_1 * keep_2 + state_2

        _, state_bts = jax.lax.associative_scan(after, (keep, (1 - keep) * value), axis=1)
        out_bts = (state_bts * jax.nn.silu(gate)).astype(x_bte.dtype)
        y_bte = jnp.einsum("bts,se->bte", out_bts, self.out_se[...])
        return ctx.constrain(y_bte, *STREAM), cache


class Hybrid(Transformer):
    """The shipped embedding and head around blocks of two kinds."""

    def __init__(self, config: RunConfig, rngs: nnx.Rngs, extra: Settings):
        super().__init__(config, rngs)
        model = config.model
        recurrence = partial(Recurrence, settings=extra)

        def linear(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs, attention=recurrence)

        def attending(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs)

        kinds = [linear] * (extra.every - 1) + [attending]
        self.blocks = Stack(kinds, model.layers, rngs)
