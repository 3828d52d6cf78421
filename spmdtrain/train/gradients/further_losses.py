"""Computes the losses of tokens after the next one, [model.multi_token], in training."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.parallel.regions import Whole
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.forward import make_losses_of
from spmdtrain.train.gradients.sums import total_of
from spmdtrain.train.part import HeadLosses, Part
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses

NAME = "multi_token_loss"


def _join(setup: Setup) -> Setup:
    """Refuses runs in which no further tokens can be predicted."""
    model = setup.model
    if model.corrupt is not None:
        why = "with a model that restores tokens"
    elif not hasattr(model.bind({}), "predict_further"):
        why = "with a model that has no predict_further"
    else:
        return setup
    fix = "--set model.multi_token=none"
    raise ConfigError(f"model.multi_token does not go {why}", fix=fix)


def _make_further_losses(setup: Setup, *, table_axes: tuple[str, ...]) -> HeadLosses | None:
    """Returns `further_losses(module, x_bte, ctx, microbatch)`, which gives side losses, sums over
    tokens.

    At depth k a place predicts the token k places after its target. It has a loss if that target
    has one and both belong to the same document. None if the model predicts only the next token.
    `table_axes`: as in `make_losses_of`.
    """
    config = setup.config.model.multi_token
    if config is None:
        return None
    losses_of = make_losses_of(setup, training=True, table_axes=table_axes)
    depths = range(1, config.depth + 1)

    def further_losses(
        module: Any, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        batches = [at_depth(microbatch, depth, ctx) for depth in depths]
        contexts = [replace(ctx, mask_bt=batch["mask"]) for batch in batches]
        # The token that a depth reads is the target of the depth before.
        tokens = [batch["targets"] for batch in (microbatch, *batches[:-1])]
        hidden, table_ve, losses = module.predict_further(x_bte, tokens, contexts)
        of_depths = [
            sum(total_of(loss) for loss in losses_of(hidden_bte, table_ve, ctx, batch).values())
            for hidden_bte, batch in zip(hidden, batches, strict=True)
        ]
        return losses | {NAME: config.weight * sum(of_depths) / config.depth}

    return further_losses


def at_depth(microbatch: Batch, depth: int, ctx: ForwardContext) -> Batch:
    """Returns the microbatch with targets and mask shifted to this depth."""
    targets_bt = _later(microbatch["targets"], depth, ctx)
    mask_bt = _later(microbatch["mask"].astype(jnp.float32), depth, ctx)
    length = targets_bt.shape[1]
    order = zigzag_order(length, ctx.zigzag)
    mask_bt = mask_bt * jnp.asarray(order + depth < length, jnp.float32)
    segment_ids_bt = microbatch.get("segment_ids")
    if segment_ids_bt is not None:
        mask_bt = mask_bt * (segment_ids_bt == _later(segment_ids_bt, depth, ctx))
    return microbatch | {"targets": targets_bt, "mask": mask_bt}


def _later(x_bt: jax.Array, places: int, ctx: ForwardContext) -> jax.Array:
    """Returns x of the token `places` later in the sequence, or of its last token."""
    length = x_bt.shape[1]
    order_t = zigzag_order(length, ctx.zigzag)
    place_of = np.argsort(order_t)

    def local(x_bs: jax.Array, order_t: jax.Array) -> jax.Array:
        return x_bs[:, jnp.asarray(place_of)[jnp.minimum(order_t + places, length - 1)]]

    # From all tokens on each device: XLA aborts if it has to partition the lookup.
    names = (("batch", Whole("time")), ("time",))
    return ctx.local_map(local, (x_bt, jnp.asarray(order_t)), names, ("batch", "time"))


MULTI_TOKEN = Part("multi_token", join=_join, make_side_losses=_make_further_losses)
