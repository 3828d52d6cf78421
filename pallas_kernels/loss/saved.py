"""`linear_saved_distillation`: the loss of a student against saved predictions of a teacher.

For each token the teacher's k likeliest next tokens are known, with their log-probabilities and the
log-probability of all others together, the *rest*. The top alone would be biased: its probabilities
do not add up to 1, so a student would learn to be surer than its teacher (arXiv:2503.16870). With
the rest as one more outcome both models have a distribution over k + 1 outcomes, and the divergence
is between those:

    KL(p || q) = sum over the k of p log(p / q) + p_rest log(p_rest / q_rest)

It is at most the divergence over the whole vocabulary, since joining outcomes loses information,
and 0 where the student agrees with the teacher.

Letters: as in student.py; k likeliest tokens.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.loss.chunks import CHUNK_LOGITS, chunk_count
from pallas_kernels.loss.student import (
    ChunkLosses,
    Head,
    Options,
    first_row,
    logits_of_student,
    sums_of_losses,
)

UNNAMED = 1.0  # in place of a log-probability, which is at most 0: the token is one of the rest
TINY = jnp.finfo(jnp.float32).tiny  # of the student's rest, relative to its largest probability


def linear_saved_distillation(  # noqa: PLR0913 - the question has as many parts
    student: Head,
    ids_btk: jax.Array,
    logs_btk1: jax.Array,
    targets_bt: jax.Array,
    *,
    mask_bt: jax.Array,
    temperature: float,
    share: float,
    axis_name: tuple[str, ...] = (),
    vocab: int | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy and the loss against the teacher, sums of mask x loss over tokens.

    Both are float32. The second is T^2 KL(p || q) over the k + 1 outcomes, where q is the softmax
    of the student's logits over T. Derivatives as in `linear_distillation`.

    Args:
      ids_btk: different ids, integers.
      logs_btk1: their log-probabilities and, last, that of the rest, of the softmax of the
        teacher's logits over T; they are divided by their sum, for they may have been rounded.
      temperature: T, above 0.
      share: of the loss against the teacher, in (0, 1].
      axis_name, vocab: as in `linear_distillation`.
      chunk_logits: at most half as many logits exist at once on a device: the other half holds the
        teacher's predictions, spread over the rows of the table.
    """
    batch, time = targets_bt.shape
    options = Options(
        of_chunk=_chunk_losses,
        chunks=chunk_count(batch, time, 2 * student.weight.shape[0], chunk_logits),
        temperature=temperature,
        share=share,
        axis_name=axis_name,
        vocab=vocab,
        student=(student.scale, student.softcap),
    )
    said = (ids_btk, logs_btk1)
    return sums_of_losses(options, student, None, said, targets_bt, mask_bt, None)


def _chunk_losses(options: Options, weight_ve, table, x_bte, targets_bt, said_bt) -> ChunkLosses:
    del table
    heat, axis_name = options.temperature, options.axis_name
    student = logits_of_student(options, weight_ve, x_bte, targets_bt)
    ids_btk, logs_btk1 = said_bt
    logs_btk1 = jnp.minimum(jax.nn.log_softmax(logs_btk1.astype(jnp.float32)), 0)
    rest_log_bt = logs_btk1[..., -1]
    rest_bt = jnp.exp(rest_log_bt)
    rows = student.logits_btv.shape[-1]
    wanted_btv = _spread(ids_btk - first_row(axis_name, rows), logs_btk1[..., :-1], rows)
    is_named_btv = wanted_btv != UNNAMED
    p_btv = jnp.where(is_named_btv, jnp.exp(wanted_btv), 0)

    most_bt = student.logits_btv.max(-1)
    if axis_name:
        most_bt = jax.lax.pmax(most_bt, axis_name)
    below_btv = student.logits_btv - most_bt[..., None]
    exp_btv = jnp.exp(below_btv)
    warm_btv = exp_btv if heat == 1 else jnp.exp(below_btv / heat)
    apart_btv = jnp.where(p_btv > 0, p_btv * (wanted_btv - below_btv / heat), 0)
    sums_5bt = jnp.stack(
        [
            exp_btv.sum(-1),
            warm_btv.sum(-1),
            jnp.sum(jnp.where(is_named_btv, 0, warm_btv), -1),
            jnp.sum(jnp.where(student.is_target_btv, below_btv, 0), -1),
            apart_btv.sum(-1),
        ]
    )
    if axis_name:
        sums_5bt = jax.lax.psum(sums_5bt, axis_name)
    total_bt, warm_bt, unnamed_bt, of_target_bt, weighted_bt = sums_5bt
    unnamed_bt = jnp.maximum(unnamed_bt, TINY)

    cross_entropy_bt = jnp.log(total_bt) - of_target_bt
    of_rest_bt = jnp.where(rest_bt > 0, rest_bt * (rest_log_bt - jnp.log(unnamed_bt)), 0)
    distilled_bt = weighted_bt + of_rest_bt + jnp.log(warm_bt)
    # The teacher's rest, shared out as the student shares out its own.
    shared_btv = warm_btv * (rest_bt / unnamed_bt)[..., None]
    apart_btv = warm_btv / warm_bt[..., None] - jnp.where(is_named_btv, p_btv, shared_btv)
    gradient_btv = student.gradient_of_products(
        options,
        options.share * heat * apart_btv,
        lambda: exp_btv / total_bt[..., None] - student.is_target_btv,
    )
    return ChunkLosses(cross_entropy_bt, heat * heat * distilled_bt, gradient_btv)


def _spread(places_btk: jax.Array, logs_btk: jax.Array, rows: int) -> jax.Array:
    """Returns [b, t, rows] with the log-probabilities at their places, and UNNAMED elsewhere.

    Places outside the rows belong to other devices.
    """
    batch, time, top = places_btk.shape
    is_here_btk = (places_btk >= 0) & (places_btk < rows)
    # Below 0 an index would count from the end. Beyond the end it is dropped, each its own.
    places_btk = jnp.where(is_here_btk, places_btk, rows + jnp.arange(top))
    b, t = jnp.arange(batch)[:, None, None], jnp.arange(time)[None, :, None]
    blank_btv = jnp.full((batch, time, rows), UNNAMED, jnp.float32)
    return blank_btv.at[b, t, places_btk].set(logs_btk, mode="drop", unique_indices=True)
