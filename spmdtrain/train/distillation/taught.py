"""Computes a student's losses against a running teacher, [distill] (arXiv:1503.02531).

The teacher reads the microbatch first, without dropout; of it only the hidden states of its head
remain. Logits of both models exist for a chunk of tokens at a time, split like the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax

from spmdtrain.compiled.step_parts import part
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.logits import logit_shape
from spmdtrain.train.batch import Batch
from spmdtrain.train.distillation import teacher_item
from spmdtrain.train.distillation.run_teacher import DISTILLED, NAME, Teacher, teacher_of
from spmdtrain.train.distillation.with_teacher import join_teacher
from spmdtrain.train.gradients.forward import head_arrays, make_context, split_axes
from spmdtrain.train.gradients.stream import in_use, make_stream, resting_specs_in
from spmdtrain.train.gradients.sums import by_source
from spmdtrain.train.part import HeadLosses, Part, Reading
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses


def _make_reading(setup: Setup) -> Reading | None:
    """Returns the weights of the teacher, in use once a step."""
    teacher = teacher_of(setup)
    if teacher is None:
        return None
    return Reading(
        lambda _, inputs: inputs.items.get(NAME),
        resting_specs_in(teacher.setup),
        lambda weights: in_use(teacher.setup, weights),
    )


def _make_head_losses(
    setup: Setup,
    *,
    training: bool,
    table_axes: tuple[str, ...],  # noqa: ARG001 - those of a pipeline, which has no teacher
) -> HeadLosses | None:
    """Returns the `head_losses` of training beside a teacher; None in evaluations, and without one.

    `loss` is the cross-entropy, and has the gradient
    of both losses; DISTILLED, T^2 KL(teacher || student), has none. For a mixture both
    are vectors, as `means` takes them.
    """
    teacher = teacher_of(setup)
    if teacher is None or not training:
        return None
    rules = setup.rules
    head_of_teacher = _make_head_of_teacher(teacher)
    axis_name, token_axes = split_axes(rules, ())
    sum_losses = _make_sum_losses(setup, teacher, axis_name)

    def local(*arrays):
        losses = sum_losses(*arrays)
        return jax.lax.psum(losses, token_axes) if token_axes else losses

    def head_losses(
        module: Any, x_bte: jax.Array, ctx: ForwardContext, microbatch: Batch
    ) -> Losses:
        hidden_btf, table_vf = head_of_teacher(ctx.read[NAME], microbatch)
        hidden_bte, table_ve = module.head(x_bte, ctx)
        arrays, names = head_arrays(rules, hidden_bte, table_ve, microbatch)
        hidden_name, table_name, *_ = names
        arrays = (*arrays, hidden_btf, table_vf)
        names = (*names, hidden_name, table_name)
        if "source" in microbatch:
            arrays = (*arrays, by_source(setup, microbatch))
            names = (*names, ("batch", None))
        return ctx.local_map(local, arrays, names, ())

    return head_losses


def _make_head_of_teacher(teacher: Teacher) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns `head(taught, microbatch)`: the teacher's hidden states and table, constants."""
    context = make_context(teacher.setup)
    stream = make_stream(teacher.setup)

    def head(taught: dict[str, jax.Array], microbatch: Batch) -> tuple[jax.Array, jax.Array]:
        ctx = context(microbatch)
        module, x_bte, _ = stream(taught, microbatch, ctx)
        return jax.lax.stop_gradient(module.head(x_bte, ctx))

    return head


def _make_sum_losses(
    setup: Setup, teacher: Teacher, axis_name: tuple[str, ...]
) -> Callable[..., Losses]:
    """Returns the sums of both losses over a device's tokens, from what `head_arrays` gives, the
    teacher's hidden states and table, and the sources of sequences in a mixture.
    """
    shape, shape_of_teacher = map(logit_shape, (setup.config.model, teacher.setup.config.model))
    distill = setup.config.distill
    # A table with more rows is padded.
    options = {"axis_name": axis_name, "vocab": setup.model.rows}
    options |= {"temperature": distill.temperature, "share": distill.share}

    from pallas_kernels.loss.distilled import linear_distillation
    from pallas_kernels.loss.student import Head

    @part("head")
    def sum_losses(  # noqa: PLR0913 - arrays of two heads
        hidden_bte, table_ve, targets_bt, mask_bt, hidden_btf, table_vf, part_bn=None
    ) -> Losses:
        loss, distilled = linear_distillation(
            Head(hidden_bte, table_ve, **shape),
            Head(hidden_btf, table_vf, **shape_of_teacher),
            targets_bt,
            mask_bt=mask_bt,
            part_bn=part_bn,
            **options,
        )
        return {"loss": loss, DISTILLED: distilled}

    return sum_losses


TEACHER = Part(
    NAME,
    items=(teacher_item.ITEM,),
    join=join_teacher,
    make_reading=_make_reading,
    make_head_losses=_make_head_losses,
    shown=(DISTILLED,),
)
