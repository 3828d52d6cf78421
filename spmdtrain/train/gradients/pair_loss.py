"""Computes losses of pairs of answers, one preferred to the other: DPO, SimPO and ORPO.

c and r are the log-probabilities of the chosen and of the rejected answer, sums over their tokens;
n_c and n_r are the numbers of these tokens, c_ref and r_ref the log-probabilities by a reference
model, which the data hold.

    dpo    -log sigmoid(beta ((c - c_ref) - (r - r_ref)))               arXiv:2305.18290
    simpo  -log sigmoid(beta (c / n_c - r / n_r) - gamma)               arXiv:2405.14734
    orpo   -c / n_c - lambda log sigmoid(odds(c / n_c) - odds(r / n_r)) arXiv:2403.07691

odds(x) = x - log(1 - exp(x)) is the logarithm of the odds of an event with log-probability x.

A sequence holds several pairs. Segments 2 i and 2 i + 1 are the two answers of pair i, each after
its prompt. Letters: b sequences, t tokens, s segments, p pairs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Losses = dict[str, jax.Array]
# Means over pairs that are reported but not minimised.
FIGURES = ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
FEWEST_POSITIONS = 3  # of a pair: two tokens and two, of which the last is no input


def segment_count(time: int) -> int:
    """Returns the number of segments that sequences of `time` tokens can hold; even."""
    return 2 * (time // FEWEST_POSITIONS + 1)


def sum_segments(x_bt: jax.Array, segment_ids_bt: jax.Array, segments: int) -> jax.Array:
    """Returns the sum over each segment, float32 [b, s]."""

    def of_sequence(x_t, ids_t):
        return jax.ops.segment_sum(x_t, ids_t, segments)  # not sorted if attention goes by a ring

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

    from pallas_kernels.loss.own import linear_token_losses

    losses = linear_token_losses(
        hidden_bte,
        table_ve,
        targets_bt,
        of_targets,
        mask_bt=mask_bt,
        axis_name=axis_name,
        **options,
    )
    return losses["loss"]


class Answers(NamedTuple):
    """The inputs of the losses of pairs, float32 [b, s]."""

    sums_bs: jax.Array  # log-probabilities, summed over learned tokens
    learned_bs: jax.Array  # the numbers of these tokens
    references_bs: jax.Array | None  # log-probabilities by the reference model, where one is needed

    @property
    def means_bs(self) -> jax.Array:
        """The mean log-probability of a learned token; 0 for an answer without one."""
        return self.sums_bs / jnp.maximum(self.learned_bs, 1)


def sum_pairs(kind: str, settings: Mapping[str, float], answers: Answers) -> Losses:
    """Returns sums over pairs of the loss `kind` and of its FIGURES, float32 scalars.

    `settings`: the settings of the loss, by their names in its formula. A pair counts if both of
    its answers have learned tokens.
    """
    is_pair_bp = _are_pairs(answers.learned_bs)
    rewards_bs, losses_bp = PAIR_LOSSES[kind](answers, **settings)
    chosen_bp, rejected_bp = _halves(rewards_bs)
    margin_bp = chosen_bp - rejected_bp
    figures = dict(zip(FIGURES, (margin_bp > 0, margin_bp, chosen_bp, rejected_bp), strict=True))

    def total(x_bp: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair_bp, x_bp.astype(jnp.float32), 0.0))

    shown = {name: jax.lax.stop_gradient(total(x_bp)) for name, x_bp in figures.items()}
    return {name: total(x_bp) for name, x_bp in losses_bp.items()} | shown


# The rewards of answers [b, s], which are reported, and the losses of pairs [b, p] by name, whose
# sum is minimised.
RewardsAndLosses = tuple[jax.Array, Losses]


def _dpo(answers: Answers, *, beta: float) -> RewardsAndLosses:
    assert answers.references_bs is not None, "the data have a reference"
    rewards_bs = beta * (answers.sums_bs - answers.references_bs)
    return rewards_bs, {"loss": _preferred(rewards_bs)}


def _simpo(answers: Answers, *, beta: float, gamma: float) -> RewardsAndLosses:
    rewards_bs = beta * answers.means_bs
    return rewards_bs, {"loss": _preferred(rewards_bs, gamma)}


def _orpo(answers: Answers, **settings: float) -> RewardsAndLosses:
    weight = settings["lambda"]
    # The odds of a certain answer, and their gradient, are infinite, so certainty is reduced by one
    # rounding.
    log_bs = jnp.minimum(answers.means_bs, -jnp.finfo(jnp.float32).eps)
    odds_bs = log_bs - jnp.log(-jnp.expm1(log_bs))
    chosen_bp, _ = _halves(answers.means_bs)
    return weight * answers.means_bs, {"loss": weight * _preferred(odds_bs) - chosen_bp}


PAIR_LOSSES: dict[str, Callable[..., RewardsAndLosses]] = {
    "dpo": _dpo,
    "simpo": _simpo,
    "orpo": _orpo,
}


def _preferred(scores_bs: jax.Array, margin: float = 0.0) -> jax.Array:
    """Returns -log sigmoid(chosen - rejected - margin), [b, p]."""
    chosen_bp, rejected_bp = _halves(scores_bs)
    return -jax.nn.log_sigmoid(chosen_bp - rejected_bp - margin)


def count_pairs(mask_bt: jax.Array, segment_ids_bt: jax.Array) -> jax.Array:
    """Returns the number of pairs whose answers are both learned, float32."""
    segments = segment_count(mask_bt.shape[-1])
    learned_bs = sum_segments(mask_bt, segment_ids_bt, segments)
    return jnp.sum(_are_pairs(learned_bs).astype(jnp.float32))


def _are_pairs(learned_bs: jax.Array) -> jax.Array:
    chosen_bp, rejected_bp = _halves(learned_bs)
    return (chosen_bp > 0) & (rejected_bp > 0)


def _halves(x_bs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the entries of the chosen and of the rejected answers, each [b, p]."""
    return x_bs[:, 0::2], x_bs[:, 1::2]
