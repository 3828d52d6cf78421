"""Direct preference optimization: the loss of pairs of answers (arXiv:2305.18290).

    loss = -log sigmoid(beta ((c - c_ref) - (r - r_ref)))

c and r are the log-probabilities of the chosen and of the rejected answer, sums over their tokens,
and c_ref and r_ref those of a reference model, which the data hold.

A sequence holds several pairs. Segments 2 i and 2 i + 1 are the two answers of pair i, each after
its prompt. Letters: b sequences, t tokens, s segments, p pairs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.loss import linear_token_losses

Losses = dict[str, jax.Array]
# Means over pairs that are shown and not minimised.
FIGURES = ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
FEWEST_POSITIONS = 3  # of a pair: two tokens and two, of which the last is no input


def segment_count(time: int) -> int:
    """Returns the number of segments that sequences of `time` tokens can hold; even."""
    return 2 * (time // FEWEST_POSITIONS + 1)


def sum_segments(x_bt: jax.Array, segment_ids_bt: jax.Array, segments: int) -> jax.Array:
    """Sums over each segment, float32 [b, s]."""

    def of_sequence(x_t, ids_t):
        return jax.ops.segment_sum(x_t, ids_t, segments, indices_are_sorted=True)

    return jax.vmap(of_sequence)(x_bt.astype(jnp.float32), segment_ids_bt)


def log_probabilities(
    options: dict[str, Any],
    hidden_bte: jax.Array,
    table_ve: jax.Array,
    targets_bt: jax.Array,
    mask_bt: jax.Array,
    axis_name: tuple[str, ...],
) -> jax.Array:
    """Returns the log-probability of each learned target, float32 [b, t]; 0 for others.

    `options`: the keywords of `linear_token_losses` that shape its logits.
    """

    def of_targets(logits_btv, targets_bt):
        of_target = jnp.take_along_axis(logits_btv, targets_bt[..., None], -1)[..., 0]
        return {"loss": of_target - jax.nn.logsumexp(logits_btv, -1)}

    found = linear_token_losses(
        hidden_bte,
        table_ve,
        targets_bt,
        of_targets,
        mask_bt=mask_bt,
        axis_name=axis_name,
        **options,
    )
    return found["loss"]


def dpo(
    beta: float, answers_bs: jax.Array, references_bs: jax.Array, learned_bs: jax.Array
) -> Losses:
    """Sums over pairs of the loss and of FIGURES, float32 scalars.

    `answers_bs` and `references_bs` are log-probabilities of segments, `learned_bs` the numbers of
    their learned tokens. A pair counts where both of its answers have some.
    """
    is_pair_bp = _are_pairs(learned_bs)
    rewards_bs = beta * (answers_bs - references_bs)
    chosen_bp, rejected_bp = rewards_bs[:, 0::2], rewards_bs[:, 1::2]
    margin_bp = chosen_bp - rejected_bp

    def total(x_bp: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair_bp, x_bp, 0.0))

    figures = (margin_bp > 0, margin_bp, chosen_bp, rejected_bp)
    shown = {
        name: jax.lax.stop_gradient(total(x_bp.astype(jnp.float32)))
        for name, x_bp in zip(FIGURES, figures, strict=True)
    }
    return {"loss": total(-jax.nn.log_sigmoid(margin_bp))} | shown


def count_pairs(mask_bt: jax.Array, segment_ids_bt: jax.Array) -> jax.Array:
    """Returns the number of pairs whose answers are both learned, float32."""
    segments = segment_count(mask_bt.shape[-1])
    learned_bs = sum_segments(mask_bt, segment_ids_bt, segments)
    return jnp.sum(_are_pairs(learned_bs).astype(jnp.float32))


def _are_pairs(learned_bs: jax.Array) -> jax.Array:
    return (learned_bs[:, 0::2] > 0) & (learned_bs[:, 1::2] > 0)
