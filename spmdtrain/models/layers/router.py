"""Defines the router of a layer: it scores experts for each token, chooses some, and weights them,
all in float32.

Letters in addition to those of this room: x experts, k chosen experts of a token, n experts of a
group.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import ExpertsConfig, TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.norm import rms_normed
from spmdtrain.models.layers.weights import INIT_STD
from spmdtrain.models.projection import FullPrecision, LoadBias

JITTER_SITE = 3  # site of the noise; those of the block are smaller
BEST_OF_GROUP = 2  # experts whose scores add up to that of their group
SMALLEST_SUM = 1e-20  # of the scores of a token that shares are made of
TOKEN = ("batch", "stream_time")

# Side losses. `LOAD` is always 0, and only its gradient means something; ENTROPY is reported but
# not minimised.
BALANCE, Z_LOSS, LOAD, ENTROPY = "balance_loss", "router_z_loss", "expert_load", "router_entropy"


class Routing(NamedTuple):
    """The experts of each token and their gates, and the side losses of choosing them."""

    ids_btk: jax.Array  # int32
    gates_btk: jax.Array  # float32
    side_losses: dict[str, jax.Array]


class Router(nnx.Module):
    """The router of one layer, which chooses `model.experts.chosen` experts for each token.

    The gates are scores without `load_bias_x`, which only influences the choice. The bias is
    updated by the number of tokens that each expert had (arXiv:2408.15664). That number comes as a
    gradient: the side loss sum_x tokens_x (bias_x - bias_x), with the second one held fixed, is 0
    and has the slope tokens_x. So counts are summed like gradients: over microbatches, stages and
    devices, and not twice if a layer's forward is recomputed. Without a bias the same parameter
    stays 0, and its gradient only shows the load.
    """

    any_order = True

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        assert config.experts is not None, "a model with experts"
        self.experts: ExpertsConfig = config.experts
        self.layers = config.layer_mlps.count("experts")
        count = self.experts.count
        # It maps the whole width to a few numbers, without a multiplier: Table 3 of muP.
        std = INIT_STD / config.width_factor
        drawn = std * jax.random.normal(rngs.params(), (config.embed, count))
        self.weight_ex = FullPrecision(drawn, out_sharding=("embed", None))
        zeros = FullPrecision(jnp.zeros(count), out_sharding=(None,))
        self.logit_bias_x = zeros if self.experts.logit_bias else None
        self.epsilon = config.norm_epsilon
        self.scale_e = _ones(config.embed) if self.experts.own_norms else None
        self.scale_x = _ones(count) if self.experts.learned_scale else None
        self.load_bias_x = LoadBias(jnp.zeros(count), out_sharding=(None,))

    def __call__(self, x_bte: jax.Array, ctx: ForwardContext) -> Routing:
        read_bte = self._normed(x_bte.astype(jnp.float32), ctx)
        read_bte = ctx.jitter(read_bte, JITTER_SITE, self.experts.jitter)
        highest = jax.lax.Precision.HIGHEST
        weight_ex = self.weight_ex[...].astype(jnp.float32)
        logits_btx = jnp.einsum("bte,ex->btx", read_bte, weight_ex, precision=highest)
        if self.logit_bias_x is not None:
            logits_btx = logits_btx + self.logit_bias_x[...].astype(jnp.float32)
        scores_btx = self._scores(logits_btx)
        bias_x = self.load_bias_x[...].astype(jnp.float32)
        ids_btk = self._choose(scores_btx, bias_x, ctx)
        chosen_btkx = ids_btk[..., None] == jnp.arange(self.experts.count)
        # By a mask and not by index: its gradient is a sum in one order.
        gates_btk = jnp.where(chosen_btkx, scores_btx[:, :, None], 0).sum(-1)
        if self.experts.normalise:
            smallest = self.experts.smallest_sum
            sums = jnp.maximum(gates_btk.sum(-1, keepdims=True), smallest)
            if self.experts.sum_epsilon:
                sums = sums + self.experts.sum_epsilon
            gates_btk = gates_btk / sums
        gates_btk = gates_btk * self.experts.scale
        if self.scale_x is not None:
            scale_x = self.scale_x[...].astype(jnp.float32)
            gates_btk = gates_btk * jnp.where(chosen_btkx, scale_x, 0).sum(-1)
        chosen_btx = chosen_btkx.any(2)
        losses = self._side_losses(logits_btx, scores_btx, chosen_btx, bias_x, ctx)
        return Routing(ids_btk, gates_btk, losses)

    def _normed(self, x_bte: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns what the router reads of the stream: x itself, if it has no norm of its own."""
        if self.scale_e is None:
            return x_bte
        scale_e = self.scale_e[...].astype(jnp.float32) * x_bte.shape[-1] ** -0.5
        return rms_normed(x_bte, scale_e, (2,), self.epsilon, ctx)

    def _scores(self, logits_btx: jax.Array) -> jax.Array:
        if self.experts.score == "softmax":
            return jax.nn.softmax(logits_btx, -1)
        return jax.nn.sigmoid(logits_btx)

    def _choose(self, scores_btx: jax.Array, bias_x: jax.Array, ctx: ForwardContext) -> jax.Array:
        """Returns the ids of the best experts of each token, the first among equals."""
        ranks_btx = jax.lax.stop_gradient(scores_btx)
        if self.experts.bias_rate is not None:
            ranks_btx = ranks_btx + jax.lax.stop_gradient(bias_x)
        # Each device sorts its own tokens: XLA would gather them first.
        choose = partial(best_experts, experts=self.experts)
        return ctx.local_map(choose, (ranks_btx,), ((*TOKEN, None),), (*TOKEN, None))

    def _side_losses(
        self,
        logits_btx: jax.Array,
        scores_btx: jax.Array,
        chosen_btx: jax.Array,
        bias_x: jax.Array,
        ctx: ForwardContext,
    ) -> dict[str, jax.Array]:
        """Returns the side losses by name, sums over the tokens that have a loss."""
        experts = self.experts
        counted_bt = jnp.ones(logits_btx.shape[:2]) if ctx.mask_bt is None else ctx.mask_bt
        share_btx = scores_btx / jnp.maximum(scores_btx.sum(-1, keepdims=True), SMALLEST_SUM)
        tokens_bx = jnp.where(chosen_btx, counted_bt[..., None], 0).sum(1)
        entropy_bt = -jax.scipy.special.xlogy(share_btx, share_btx).sum(-1)
        entropy = (entropy_bt * counted_bt).sum() / self.layers
        losses = {
            LOAD: (tokens_bx.sum(0) * (bias_x - jax.lax.stop_gradient(bias_x))).sum(),
            ENTROPY: jax.lax.stop_gradient(entropy),
        }
        if experts.balance:
            share_bx = (share_btx * counted_bt[..., None]).sum(1)
            of_batch = experts.balance_over == "batch"
            losses[BALANCE] = (
                experts.balance
                * _balance(tokens_bx, share_bx, counted_bt.sum(1), ctx if of_batch else None)
                / experts.chosen
            )
        if experts.z_loss:
            log_sum_bt = jax.nn.logsumexp(logits_btx, -1)
            losses[Z_LOSS] = experts.z_loss * (jnp.square(log_sum_bt) * counted_bt).sum()
        return losses


def _ones(size: int) -> FullPrecision:
    return FullPrecision(jnp.ones(size), out_sharding=(None,))


def best_experts(ranks_btx: jax.Array, experts: ExpertsConfig) -> jax.Array:
    """Returns the ids [b, t, k] of the experts with the highest ranks, int32.

    If `experts` has groups, only experts of the best groups can be chosen.
    """
    if experts.groups_kept < experts.groups:
        size = experts.count // experts.groups
        ranks_btgn = ranks_btx.reshape(*ranks_btx.shape[:2], experts.groups, size)
        of_group_btg = jax.lax.top_k(ranks_btgn, min(BEST_OF_GROUP, size))[0].sum(-1)
        kept_btk = jax.lax.top_k(of_group_btg, experts.groups_kept)[1]
        is_kept_btg = (kept_btk[..., None] == jnp.arange(experts.groups)).any(2)
        # Below every rank: with 0 instead, a group left out would win over a negative bias.
        eligible = jnp.where(is_kept_btg[..., None], ranks_btgn, -jnp.inf)
        ranks_btx = eligible.reshape(ranks_btx.shape)
    return jax.lax.top_k(ranks_btx, experts.chosen)[1].astype(jnp.int32)


def _balance(
    tokens_bx: jax.Array,
    share_bx: jax.Array,
    counted_b: jax.Array,
    of_batch: ForwardContext | None,
) -> jax.Array:
    """Returns the balance loss times its tokens, for one chosen expert, summed over sequences.

    With f_x the share of tokens that chose x, and P_x its mean score, it is count * sum_x f_x P_x.
    f is taken over each sequence or, with `of_batch`, over all sequences on the devices of the
    batch.
    """
    count = tokens_bx.shape[-1]
    if of_batch is None:
        of_all_bx = tokens_bx / jnp.maximum(counted_b, 1)[:, None]
    else:
        tokens_x, counted = of_batch.sum_over_batch((tokens_bx.sum(0), counted_b.sum()))
        of_all_bx = (tokens_x / jnp.maximum(counted, 1))[None]
    return count * (jax.lax.stop_gradient(of_all_bx) * share_bx).sum()
