"""Computes the teacher's logits to save, and a student's losses against saved ones.

Letters: B sequences of a microbatch, T tokens of a sequence, K likeliest tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled.step_parts import part
from spmdtrain.data.saved_logits.manifest import Manifest, saved_for
from spmdtrain.data.saved_logits.reader import IDS, LOGS
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logit_shape
from spmdtrain.models.model import LanguageModel
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.train.batch import Batch
from spmdtrain.train.distillation.run_teacher import DISTILLED, check_loss
from spmdtrain.train.distillation.run_teacher import NAME as TEACHER
from spmdtrain.train.gradients.forward import (
    TOKEN,
    head_arrays,
    make_context,
    split_axes,
)
from spmdtrain.train.gradients.stream import in_use, make_stream, resting_specs_in
from spmdtrain.train.joined import Joined, LearnedFrom
from spmdtrain.train.part import HeadLosses, Part
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses

NAME = "saved_logits"
BATCH = P(None, BATCH_AXES)  # of arrays [accumulation, sequences, ...]
LIKELIEST = (*TOKEN, None)  # the logical axes of what was said of tokens


@dataclass(frozen=True)
class SavedLogitsOfRun(Joined):
    """The saved logits that a run learns from. `setting` names them."""

    manifest: Manifest
    setting: str

    def learns_from(self) -> dict[str, LearnedFrom]:
        return {TEACHER: LearnedFrom(self.setting, self.manifest.fingerprint)}


def _join(setup: Setup) -> Setup:
    """Returns the setup of a run with the saved logits that it names; the same if it names none.

    Raises UserError if they do not fit the run.
    """
    manifest = saved_for(setup.config)
    if manifest is None:
        return setup
    check_loss(setup)
    arrays = {IDS: ("int32", (manifest.top,)), LOGS: ("float32", (manifest.top + 1,))}
    return replace(
        setup,
        own={**setup.own, NAME: SavedLogitsOfRun(manifest, setup.config.distill.source)},
        batch_arrays={**setup.batch_arrays, **arrays},
    )


def _make_head_losses(
    setup: Setup, *, training: bool, table_axes: tuple[str, ...]
) -> HeadLosses | None:
    """Returns the `head_losses` of training on saved logits; None in evaluations, and without any.

    `loss` is the cross-entropy, and has the gradient of both losses; DISTILLED, T^2 KL(teacher ||
    student), has none.
    """
    if not training or NAME not in setup.own:
        return None
    rules = setup.rules
    axis_name, token_axes = split_axes(rules, table_axes)
    sum_losses = _make_sum_losses(setup, axis_name)

    def local(*arrays):
        losses = sum_losses(*arrays)
        return jax.lax.psum(losses, token_axes) if token_axes else losses

    def head_losses(
        module: LanguageModel, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        arrays, names = head_arrays(rules, *module.head(x_bte, ctx), microbatch)
        arrays = (*arrays, microbatch[IDS], microbatch[LOGS])
        return ctx.local_map(local, arrays, (*names, LIKELIEST, LIKELIEST), ())

    return head_losses


def _make_sum_losses(setup: Setup, axis_name: tuple[str, ...]) -> Callable[..., Losses]:
    """Returns the sums of both losses over a device's tokens, from what `head_arrays` gives and the
    saved logits.
    """
    shape, distill = logit_shape(setup.config.model), setup.config.distill
    # A table with more rows is padded.
    options = {"axis_name": axis_name, "vocab": setup.model.rows}
    options |= {"temperature": distill.temperature, "share": distill.share}

    from pallas_kernels.loss.saved import linear_saved_distillation
    from pallas_kernels.loss.student import Head

    @part("head")
    def sum_losses(hidden_bte, table_ve, targets_bt, mask_bt, ids_btk, logs_btk1) -> Losses:
        loss, distilled = linear_saved_distillation(
            Head(hidden_bte, table_ve, **shape),
            ids_btk,
            logs_btk1,
            targets_bt,
            mask_bt=mask_bt,
            **options,
        )
        return {"loss": loss, DISTILLED: distilled}

    return sum_losses


def make_likeliest(setup: Setup, top: int, temperature: float) -> Callable[..., Any]:
    """Returns `(params, batch) -> (ids, log-probabilities)`, what is saved of each token.

    They are int32 [accumulation, B, T, K] and float32 [accumulation, B, T, K + 1], as
    `linear_likeliest` returns them, without dropout. The mesh has no pipeline.
    """
    from pallas_kernels.loss.likeliest import linear_likeliest
    from pallas_kernels.loss.student import Head

    context = make_context(setup)
    stream = make_stream(setup)
    shape = logit_shape(setup.config.model)
    axis_name, _ = split_axes(setup.rules, ())
    options = {"axis_name": axis_name, "vocab": setup.model.rows}
    options |= {"top": top, "temperature": temperature}

    def likeliest(hidden_bte, table_ve, *of_targets):
        del of_targets
        return linear_likeliest(Head(hidden_bte, table_ve, **shape), **options)

    def local(params, batch: Batch):
        weights = in_use(setup, params)

        def one(_, microbatch):
            ctx = context(microbatch)
            module, x_bte, _ = stream(weights, microbatch, ctx)
            hidden_bte, table_ve = module.head(x_bte, ctx)
            arrays, names = head_arrays(setup.rules, hidden_bte, table_ve, microbatch)
            return None, ctx.local_map(likeliest, arrays, names, LIKELIEST)

        return jax.lax.scan(one, None, batch)[1]

    return manual_region(local, setup.mesh, MANUAL_AXES, (resting_specs_in(setup), BATCH), BATCH)


SAVED_LOGITS = Part(NAME, join=_join, make_head_losses=_make_head_losses, shown=(DISTILLED,))
