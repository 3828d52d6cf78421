"""Runs one microbatch through the model, up to the sums of its losses.

B: sequences of a microbatch, T: tokens of a sequence, E: width of the stream, V: rows of the head's
table.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.models.abstract import make_manual_gather_layer
from spmdtrain.models.context import AroundLayer, ForwardContext, sample_noise
from spmdtrain.models.model import LanguageModel
from spmdtrain.models.stack import sum_losses
from spmdtrain.parallel.axes import Rules, axes_of_dim
from spmdtrain.parallel.regions import (
    MANUAL_AXES,
    Name,
    Whole,
    make_constrain,
    make_local_map,
    make_sum_over_batch,
)
from spmdtrain.parallel.tensor_matmul import (
    make_column_parallel,
    make_find_parts,
    make_find_ring,
    make_row_parallel,
    no_ring,
    stream_is_split,
)
from spmdtrain.parallel.vocabulary import make_lookup
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.sums import by_source
from spmdtrain.train.part import HeadLosses, Parts
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses, make_sum_losses

TOKEN = ("batch", "time")  # the logical axes of tokens


def make_context(setup: Setup, parts: Parts = ()) -> Callable[..., ForwardContext]:
    """Returns `context(microbatch, step, read) -> ForwardContext`; with `step` given, dropout is
    on, and parts run around the layers. `read`: what they have brought beside the weights.
    """
    train = setup.config.train
    dropout = setup.config.model.dropout
    experts = setup.config.model.experts
    has_noise = max(dropout, setup.config.finetune.dropout, experts.jitter if experts else 0) > 0
    around_layer = make_around_layer(setup, parts)
    rules = setup.rules
    constrain = make_constrain(rules, MANUAL_AXES)
    local_map = make_local_map(rules, MANUAL_AXES)
    lookup = make_lookup(rules, MANUAL_AXES)
    gather_layer = gather_layer_of(setup)
    remat = train.remat
    if remat == "none" and setup.gathers_by_layer:
        remat = "weights"

    find_ring = no_ring
    if setup.config.mesh.collective_matmul:
        find_ring = make_find_ring(rules, MANUAL_AXES)
    gathers_again = stream_is_split(rules) and remat in ("none", "weights")
    copies = max(copied.ways for copied in setup.copies.values())
    # Only XLA's CPU backend gains by it: on a GPU it costs one more fusion for some products.
    local = setup.platform == "cpu" and all(
        size == 1 or axis in MANUAL_AXES for axis, size in rules.sizes.items()
    )
    how: dict[str, Any] = {
        "find_parts": make_find_parts(rules, MANUAL_AXES),
        "copies": copies,
        "local": local,
    }
    column_parallel = make_column_parallel(constrain, find_ring, gathers_again=gathers_again, **how)
    row_parallel = make_row_parallel(constrain, find_ring, **how)
    own_experts = _make_experts(setup)

    def context(
        microbatch: Batch, step: jax.Array | None = None, read: Mapping[str, Any] | None = None
    ) -> ForwardContext:
        tokens_bt = microbatch["tokens"]
        positions_bt = microbatch.get("positions")
        if positions_bt is None:
            from_zero = jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
            positions_bt = jnp.broadcast_to(from_zero, tokens_bt.shape)
        noise_b = None
        if step is not None and (has_noise or around_layer):
            noise_b = sample_noise(train.seed, step, microbatch["sample"])
        return ForwardContext(
            positions_bt=positions_bt,
            segment_ids_bt=microbatch.get("segment_ids"),
            ids_bt=tokens_bt if setup.config.model.token_layers else None,
            mask_bt=microbatch["mask"].astype(jnp.float32) if experts else None,
            constrain=constrain,
            local_map=local_map,
            lookup=lookup,
            gather_layer=gather_layer,
            remat=remat,
            scan_layers=setup.scans_layers,
            column_matmul=column_parallel,
            row_matmul=row_parallel,
            sum_over_batch=make_sum_over_batch(rules),
            dropout_rate=dropout,
            noise_b=noise_b,
            context_method=setup.context_method,
            frozen_layers=setup.config.frozen_in_stack,
            read=read or {},
            around_layer=None if step is None else around_layer,
            **own_experts,
        )

    return context


def _make_experts(setup: Setup) -> dict[str, Any]:
    """Returns {"experts": those on the devices of the mesh}, for a model with such weights."""
    if not setup.model.has_experts:
        return {}
    from spmdtrain.parallel.experts import make_experts

    config = setup.config.model.experts
    factor = {"factor": config.bucket_factor} if config else {}
    return {"experts": make_experts(setup.rules, MANUAL_AXES, **factor)}


def make_around_layer(setup: Setup, parts: Parts) -> AroundLayer | None:
    """Returns what the parts run in place of a layer, the first of them outermost; None: nothing
    but the layer.
    """
    makers = [part.make_layer for part in parts if part.make_layer]
    hooks = [hook for make in makers if (hook := make(setup))]
    if not hooks:
        return None

    return reduce(_around, hooks)


def _around(outer: AroundLayer, inner: AroundLayer) -> AroundLayer:
    """Returns what runs `outer` around `inner` around a layer."""
    return lambda run, x, ctx: outer(lambda x: inner(run, x, ctx), x, ctx)


def gather_layer_of(setup: Setup) -> Callable[[nnx.State], nnx.State]:
    """Returns `gather(state)`, which gives the weights of a layer, whole and in compute precision.

    It returns them unchanged if layers need not gather.
    """
    if not setup.gathers_by_layer:
        return lambda state: state
    return make_manual_gather_layer(setup.rules, setup.config.precision)


def make_head_losses(
    setup: Setup, parts: Parts = (), *, training: bool, table_axes: tuple[str, ...] = ()
) -> HeadLosses:
    """Returns `head_losses(module, x_bte, ctx, microbatch)`: sums over unmasked tokens, by name.

    They are float32 scalars; in the training of a mixture also vectors, as `means` takes them.
    `table_axes`: the manual mesh axes over which the rows of the head's table are split. A part's
    head losses replace those of tokens.
    """
    makers = (part.make_head_losses for part in parts if part.make_head_losses)
    of_parts = (make(setup, training=training, table_axes=table_axes) for make in makers)
    of_part = next((losses for losses in of_parts if losses is not None), None)
    if of_part is not None:
        return of_part
    losses_of = make_losses_of(setup, training=training, table_axes=table_axes)

    def head_losses(
        module: LanguageModel, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        return losses_of(*module.head(x_bte, ctx), ctx, microbatch)

    return head_losses


def make_side_losses(
    setup: Setup, parts: Parts, *, table_axes: tuple[str, ...] = ()
) -> HeadLosses | None:
    """Returns `side_losses(module, x_bte, ctx, microbatch)`: the sums that parts add to the losses
    of the head, by name; None if no part adds any. Arguments are those of `make_head_losses`.
    """
    makers = (part.make_side_losses for part in parts if part.make_side_losses)
    of_parts = [losses for make in makers if (losses := make(setup, table_axes=table_axes))]
    if len(of_parts) < 2:
        return next(iter(of_parts), None)
    return lambda *arguments: sum_losses(*(losses(*arguments) for losses in of_parts))


def make_losses_of(
    setup: Setup, *, training: bool, table_axes: tuple[str, ...] = ()
) -> Callable[..., Losses]:
    """Returns `losses_of(hidden_bte, table_ve, ctx, microbatch)`, for the output of a head.

    Result and arguments are those of `make_head_losses`.
    """
    rules = setup.rules
    # A table with more rows is padded.
    sum_losses = make_sum_losses(
        setup.config, setup.loss, vocab=setup.model.rows, training=training
    )
    axis_name, token_axes = split_axes(rules, table_axes)

    def local(hidden_bte, table_ve, targets_bt, mask_bt, part_bn=None):
        losses = sum_losses(hidden_bte, table_ve, targets_bt, mask_bt, axis_name, part_bn)
        return jax.lax.psum(losses, token_axes) if token_axes else losses

    def losses_of(
        hidden_bte: jax.Array, table_ve: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        arrays, names = head_arrays(rules, hidden_bte, table_ve, microbatch)
        if training and "source" in microbatch:
            arrays = (*arrays, by_source(setup, microbatch))
            names = (*names, ("batch", None))
        return ctx.local_map(local, arrays, names, ())

    return losses_of


def head_arrays(
    rules: Rules, hidden_bte: jax.Array, table_ve: jax.Array, microbatch: Batch
) -> tuple[tuple, tuple]:
    """Returns the arrays from which every loss of the head is computed, and their logical axes."""
    # The full logits never exist; their spec refuses a mesh axis that would split tokens and
    # vocabulary.
    logits_shape = (*microbatch["targets"].shape, table_ve.shape[0])
    rules.activation_spec((*TOKEN, "vocab"), logits_shape, drop=MANUAL_AXES)
    mask_bt = microbatch["mask"].astype(jnp.float32)
    arrays = (hidden_bte, table_ve, microbatch["targets"], mask_bt)
    names = (("batch", hidden_time(rules), None), ("vocab", None), TOKEN, TOKEN)
    return arrays, names


def split_axes(
    rules: Rules, table_axes: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the mesh axes that split the head's vocabulary, and the automatic ones of tokens."""

    def automatic_axes(*names: str) -> tuple[str, ...]:
        axes = [axis for name in names for axis in rules.activations[name]]
        return tuple(axis for axis in axes if rules.sizes[axis] > 1 and axis not in MANUAL_AXES)

    return (*table_axes, *automatic_axes("vocab")), automatic_axes(*TOKEN)


def hidden_time(rules: Rules) -> Name:
    """Returns how the tokens of the head's input are sharded in the loss.

    If the stream is split further than the targets (sequence parallelism), they are gathered there,
    and their gradient, a sum over the parts of the vocabulary, is scattered. Summed whole, it would
    be twice the traffic.
    """
    (stream,) = rules.activation_spec(("stream_time",), (0,))
    (targets,) = rules.activation_spec(("time",), (0,))
    outer = axes_of_dim(targets)
    if axes_of_dim(stream)[: len(outer)] == outer:
        return Whole("stream_time", but_for="time")
    return "time"
