"""Runs one microbatch through the model, up to the sums of its losses.

B: sequences of a microbatch, T: tokens of a sequence, E: width of the stream, V: rows of the head's
table.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.models.abstract import make_manual_gather_layer
from spmdtrain.models.context import ForwardContext, sample_noise
from spmdtrain.models.logits import logit_shape
from spmdtrain.models.model import LanguageModel
from spmdtrain.parallel.axes import Rules, axes_of_dim
from spmdtrain.parallel.experts import make_experts
from spmdtrain.parallel.matmuls.tensor_matmul import (
    make_column_parallel,
    make_find_parts,
    make_find_ring,
    make_row_parallel,
    no_ring,
    stream_is_split,
)
from spmdtrain.parallel.regions import (
    MANUAL_AXES,
    Name,
    Whole,
    make_constrain,
    make_local_map,
    make_sum_over_batch,
)
from spmdtrain.parallel.vocabulary import make_lookup
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.pair_loss import (
    Answers,
    log_probabilities,
    segment_count,
    sum_pairs,
    sum_segments,
)
from spmdtrain.train.gradients.sums import by_source
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses, make_sum_losses

TOKEN = ("batch", "time")  # the logical axes of tokens


def make_context(setup: Setup) -> Callable[..., ForwardContext]:
    """Returns `context(microbatch, step) -> ForwardContext`; with `step` given, dropout is on."""
    train = setup.config.train
    dropout = setup.config.model.dropout
    experts = setup.config.model.experts
    has_noise = max(dropout, setup.config.finetune.dropout, experts.jitter if experts else 0) > 0
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
    copies = max(each.ways for each in setup.copies.values())
    # Only XLA's CPU backend gains by it: on a GPU it costs one more fusion for some products.
    local = setup.mesh.devices.flat[0].platform == "cpu" and all(
        size == 1 or axis in MANUAL_AXES for axis, size in rules.sizes.items()
    )
    how: dict[str, Any] = {
        "find_parts": make_find_parts(rules, MANUAL_AXES),
        "copies": copies,
        "local": local,
    }
    column_parallel = make_column_parallel(constrain, find_ring, gathers_again=gathers_again, **how)
    row_parallel = make_row_parallel(constrain, find_ring, **how)
    factor = {"factor": experts.bucket_factor} if experts else {}
    through_experts = make_experts(rules, MANUAL_AXES, **factor)

    def context(microbatch: Batch, step: jax.Array | None = None) -> ForwardContext:
        tokens_bt = microbatch["tokens"]
        positions_bt = microbatch.get("positions")
        if positions_bt is None:
            from_zero = jnp.arange(tokens_bt.shape[1], dtype=jnp.int32)
            positions_bt = jnp.broadcast_to(from_zero, tokens_bt.shape)
        noise_b = None
        if step is not None and has_noise:
            noise_b = sample_noise(train.seed, step, microbatch["sample"])
        return ForwardContext(
            positions_bt=positions_bt,
            segment_ids_bt=microbatch.get("segment_ids"),
            mask_bt=microbatch["mask"].astype(jnp.float32) if experts else None,
            constrain=constrain,
            local_map=local_map,
            lookup=lookup,
            gather_layer=gather_layer,
            remat=remat,
            scan_layers=setup.scans_layers,
            column_matmul=column_parallel,
            row_matmul=row_parallel,
            experts=through_experts,
            sum_over_batch=make_sum_over_batch(rules),
            dropout_rate=dropout,
            noise_b=noise_b,
            context_method=setup.context_method,
            frozen_layers=setup.config.frozen_in_stack,
        )

    return context


def gather_layer_of(setup: Setup) -> Callable[[nnx.State], nnx.State]:
    """Returns `gather(state)`, which gives the weights of a layer, whole and in compute precision.

    It returns them unchanged if layers need not gather.
    """
    if not setup.gathers_by_layer:
        return lambda state: state
    return make_manual_gather_layer(setup.rules, setup.config.precision)


def make_head_losses(
    setup: Setup, *, training: bool, table_axes: tuple[str, ...] = ()
) -> Callable[..., Losses]:
    """Returns `head_losses(module, x_bte, ctx, microbatch)`: sums over unmasked tokens, by name.

    They are float32 scalars; in the training of a mixture also vectors, as `means` takes them.
    `table_axes`: the manual mesh axes over which the rows of the head's table are split.
    """
    if setup.config.train.learns_pairs:
        return _make_pair_losses(setup, table_axes)
    losses_of = make_losses_of(setup, training=training, table_axes=table_axes)

    def head_losses(
        module: LanguageModel, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        return losses_of(*module.head(x_bte, ctx), ctx, microbatch)

    return head_losses


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


def make_segment_sums(setup: Setup, table_axes: tuple[str, ...] = ()) -> Callable[..., jax.Array]:
    """Returns `segment_sums(module, x_bte, ctx, microbatch)`, which gives log-probabilities,
    float32 [B, S].

    They are sums over the unmasked tokens of a segment; S is `pair_loss.segment_count`.
    """
    rules = setup.rules
    options = {"vocab": setup.model.rows, **logit_shape(setup.config.model)}
    axis_name, token_axes = split_axes(rules, table_axes)
    segments = segment_count(setup.config.train.sequence_length)

    def local(hidden_bte, table_ve, targets_bt, mask_bt, segment_ids_bt):
        arrays = (hidden_bte, table_ve, targets_bt, mask_bt)
        found_bt = log_probabilities(options, *arrays, axis_name)
        sums_bs = sum_segments(found_bt, segment_ids_bt, segments)
        return jax.lax.psum(sums_bs, token_axes) if token_axes else sums_bs

    def segment_sums(
        module: LanguageModel, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> jax.Array:
        arrays, names = head_arrays(rules, *module.head(x_bte, ctx), microbatch)
        arrays = (*arrays, microbatch["segment_ids"])
        return ctx.local_map(local, arrays, (*names, TOKEN), ("batch", None))

    return segment_sums


def _make_pair_losses(setup: Setup, table_axes: tuple[str, ...]) -> Callable[..., Losses]:
    """Returns the `head_losses` of pairs of answers: sums over pairs."""
    segment_sums = make_segment_sums(setup, table_axes)
    segments = segment_count(setup.config.train.sequence_length)
    train = setup.config.train

    def head_losses(
        module: LanguageModel, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        def total(name: str) -> jax.Array:
            return sum_segments(microbatch[name], microbatch["segment_ids"], segments)

        answers = Answers(
            sums_bs=segment_sums(module, x_bte, ctx, microbatch),
            learned_bs=total("mask"),
            references_bs=total("reference") if train.needs_reference else None,
        )
        return sum_pairs(train.preference, train.of_preference, answers)

    return head_losses


def head_arrays(
    rules: Rules, hidden_bte: jax.Array, table_ve: jax.Array, microbatch: Batch
) -> tuple[tuple, tuple]:
    """Returns what every loss of the head is computed from, and the logical axes of each."""
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
