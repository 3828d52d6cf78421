"""`linear_distillation`: the loss of a student against a teacher, a chunk of tokens at a time.

The logits of both exist for one chunk only, and a device has the logits of its own rows of the two
tables. As in `linear_cross_entropy`, the gradients of the student are computed along with the loss.

Letters: b sequences, t time, e width of the student, f width of the teacher, v rows of a table on
this device, n parts.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.loss.api import einsum_in_float32, shape_logits
from pallas_kernels.loss.chunks import CHUNK_LOGITS, chunk_count
from pallas_kernels.loss.student import (
    ChunkLosses,
    Head,
    Options,
    logits_of_student,
    sums_of_losses,
)


def linear_distillation(  # noqa: PLR0913 - the question has as many parts
    student: Head,
    teacher: Head,
    targets_bt: jax.Array,
    *,
    mask_bt: jax.Array,
    temperature: float,
    share: float,
    axis_name: tuple[str, ...] = (),
    vocab: int | None = None,
    part_bn: jax.Array | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy and the loss against the teacher, sums of mask x loss over tokens.

    Both are float32. With p and q, the softmax of the teacher's and of the student's logits over T,
    the second is T^2 KL(p || q) (as in arXiv:1503.02531, minus the teacher's entropy, a constant,
    so that it is 0 where both agree). The gradients of KL fall by T^2, and the factor restores
    them.

    The derivative of the first result is that of (1 - share) x cross-entropy + share x T^2 KL; the
    second is a constant to differentiation, and so are the teacher and the mask.

    Args:
      temperature: T, above 0.
      share: of the loss against the teacher, in (0, 1].
      axis_name: mesh axes that split the rows of both tables alike, inside a shard_map that is
        manual over them. The sums are whole on every device; the gradient of x is partial: psum it.
      vocab: rows of the tables that count, from the first, over all devices.
      part_bn: `parts` of `linear_cross_entropy`; the sums of the parts follow the whole sum, in
        both results: [1 + n].
      chunk_logits: at most this many logits of both models exist at once, but at least those of one
        time step.
    """
    devices = jax.lax.psum(1, axis_name) if axis_name else 1
    batch, time = targets_bt.shape
    rows = student.weight.shape[0]
    if teacher.weight.shape[0] != rows:
        raise ValueError(
            f"linear_distillation: tables of {rows} and {teacher.weight.shape[0]} rows"
        )
    options = Options(
        of_chunk=_chunk_losses,
        chunks=chunk_count(batch, time, 2 * rows * devices, chunk_logits),
        temperature=temperature,
        share=share,
        axis_name=axis_name,
        vocab=vocab,
        student=(student.scale, student.softcap),
        teacher=(teacher.scale, teacher.softcap),
    )
    table_vf = jax.lax.stop_gradient(teacher.weight)
    return sums_of_losses(options, student, table_vf, (teacher.x,), targets_bt, mask_bt, part_bn)


def _chunk_losses(
    options: Options, weight_ve, teacher_vf, x_bte, targets_bt, said_bt
) -> ChunkLosses:
    heat, axis_name = options.temperature, options.axis_name
    (teacher_btf,) = said_bt
    student = logits_of_student(options, weight_ve, x_bte, targets_bt)
    logits_btv, counts = student.logits_btv, student.counts
    wanted_btv = einsum_in_float32("btf,vf->btv", teacher_btf, teacher_vf)
    wanted_btv = jnp.where(counts, shape_logits(wanted_btv, *options.teacher), -jnp.inf)

    # A shift of logits that changes nothing but rounding.
    most_2bt = jnp.stack([logits_btv.max(-1), wanted_btv.max(-1)])
    if axis_name:
        most_2bt = jax.lax.pmax(most_2bt, axis_name)
    below_btv, wanted_below_btv = (
        logits_btv - most_2bt[0, ..., None],
        wanted_btv - most_2bt[1, ..., None],
    )
    exp_btv = jnp.exp(below_btv)
    warm_btv = exp_btv if heat == 1 else jnp.exp(below_btv / heat)
    wanted_exp_btv = jnp.exp(wanted_below_btv / heat)
    apart_btv = jnp.where(counts, wanted_below_btv - below_btv, 0)
    sums_5bt = jnp.stack(
        [
            exp_btv.sum(-1),
            warm_btv.sum(-1),
            wanted_exp_btv.sum(-1),
            jnp.sum(jnp.where(student.is_target_btv, below_btv, 0), -1),
            jnp.sum(wanted_exp_btv * apart_btv, -1),
        ]
    )
    if axis_name:
        sums_5bt = jax.lax.psum(sums_5bt, axis_name)
    total_bt, warm_bt, wanted_bt, of_target_bt, weighted_bt = sums_5bt

    cross_entropy_bt = jnp.log(total_bt) - of_target_bt
    distilled_bt = weighted_bt / wanted_bt / heat + jnp.log(warm_bt) - jnp.log(wanted_bt)
    apart_btv = warm_btv / warm_bt[..., None] - wanted_exp_btv / wanted_bt[..., None]
    gradient_btv = student.gradient_of_products(
        options,
        options.share * heat * apart_btv,
        lambda: exp_btv / total_bt[..., None] - student.is_target_btv,
    )
    return ChunkLosses(cross_entropy_bt, heat * heat * distilled_bt, gradient_btv)
