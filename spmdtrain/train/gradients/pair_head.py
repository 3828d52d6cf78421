"""Computes the losses of pairs of answers, `train.preference`, and what a reference model needs.

B: sequences of a microbatch, S: segments of a sequence.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logit_shape
from spmdtrain.models.model import LanguageModel
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.forward import TOKEN, head_arrays, make_context, split_axes
from spmdtrain.train.gradients.pair_loss import (
    FIGURES,
    Answers,
    log_probabilities,
    segment_count,
    sum_pairs,
    sum_segments,
)
from spmdtrain.train.gradients.stream import in_use, make_stream, resting_specs_in
from spmdtrain.train.part import HeadLosses, Part
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses


def _make_head_sums(setup: Setup, table_axes: tuple[str, ...] = ()) -> Callable[..., jax.Array]:
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


def make_segment_sums(setup: Setup) -> Callable[..., jax.Array]:
    """Returns `(params, batch) -> float32 [accumulation, sequences, segments]`, without dropout.

    The result has the log-probabilities of segments, as a reference model gives them.
    """
    context = make_context(setup)
    stream = make_stream(setup)
    of_head = _make_head_sums(setup)

    def local(params, batch: Batch):
        weights = in_use(setup, params)

        def one(_, microbatch):
            ctx = context(microbatch)
            module, x_bte, _ = stream(weights, microbatch, ctx)
            return None, of_head(module, x_bte, ctx, microbatch)

        return jax.lax.scan(one, None, batch)[1]

    of_batch = P(None, BATCH_AXES)
    in_specs = (resting_specs_in(setup), of_batch)
    return manual_region(local, setup.mesh, MANUAL_AXES, in_specs, of_batch)


def _make_pair_losses(
    setup: Setup,
    *,
    training: bool,  # noqa: ARG001
    table_axes: tuple[str, ...],
) -> HeadLosses | None:
    """Returns the `head_losses` of pairs of answers: sums over pairs. None if a run learns none."""
    if not setup.config.train.learns_pairs:
        return None
    segment_sums = _make_head_sums(setup, table_axes)
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


PAIRS = Part("pairs", make_head_losses=_make_pair_losses, shown=FIGURES)
