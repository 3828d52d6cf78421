"""Builds the loss of a token: cross-entropy, with the options set, or a custom function.

Both become a function of the head's hidden states and table, which returns sums by name. Training
minimises the sum of all of them; evaluation has only `loss`.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.loss import linear_cross_entropy
from spmdtrain.compiled.step_parts import part
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.own_parts import own_part
from spmdtrain.config.schema import RunConfig, TrainConfig
from spmdtrain.models.logits import logit_shape
from spmdtrain.train.items.items import Items

Losses = dict[str, jax.Array]  # by name, float32
# What a user may give: (logits [b, t, v], targets [b, t]) -> losses [b, t], one array of them or
# several by name.
TokenLoss = Callable[[jax.Array, jax.Array], jax.Array | Mapping[str, jax.Array]]
# (hidden_bte, table_ve, targets_bt, mask_bt, axis_name, part_bn) -> sums over the unmasked tokens.
# With part_bn, sequences by source, a sum may be a vector [1 + n]: of all, then of each source.
SumLosses = Callable[..., Losses]

OF_THE_STEP = {"tokens", "pairs", "grad_norm", "learning_rate", "skipped"}
SAME_LOSS = 1e-3  # relative; rounding is far below, and a mean over the tokens of a call above
TAKES = (
    "a function (logits [b, t, v], targets [b, t]) -> losses [b, t], or a dict of them with 'loss'"
)


def of_the_step(items: Items) -> set[str]:
    """Returns the names of a step's other figures: all remaining ones are means."""
    return OF_THE_STEP | items.figure_names


def make_sum_losses(
    config: RunConfig, own: TokenLoss | None, *, vocab: int, training: bool
) -> SumLosses:
    """Returns the losses of the head: those of `own`, or of the settings if it is None.

    `vocab`: rows of the head's table that count, from the first. Label smoothing and z-loss only
    shape training, so evaluations stay comparable.
    """
    options = {"vocab": vocab, **logit_shape(config.model)}
    if own is not None:
        return partial(_sum_own, own, training, options)
    if training:
        options |= {"label_smoothing": config.train.label_smoothing, "z_loss": config.train.z_loss}
        options["logits_dtype"] = config.precision.logits
    return partial(_sum_cross_entropy, options)


def choose(config: RunConfig, own: TokenLoss | None, items: Items) -> TokenLoss | None:
    """Returns `own`, or the loss named by `own.loss`; None for the built-in loss.

    Raises ConfigError if it is not a loss of tokens, if a token's loss depends on the others, or if
    settings would shape the loss that it replaces.
    """
    own = own_part(config, "loss") if own is None else own
    if own is not None:
        if config.precision.logits != "float32":
            what = f"precision.logits={config.precision.logits!r} is of the shipped loss, not loss="
            raise ConfigError(what, fix="--set precision.logits=float32")
        _check(config.train, own, config.vocab, of_the_step(items))
    return own


def _check(config: TrainConfig, own: TokenLoss, vocab: int, others: Collection[str]) -> None:
    if config.learns_pairs:
        what = f"train.preference={config.preference!r} is a loss of pairs, not loss="
        raise ConfigError(what, fix="one of both")
    for name in ("label_smoothing", "z_loss"):
        if getattr(config, name):
            raise ConfigError(
                f"train.{name}={getattr(config, name):g} shapes the shipped loss, not loss=",
                fix=f"--set train.{name}=0",
            )
    if not callable(own):
        raise ConfigError(f"loss={own!r:.80} is not a loss", fix=TAKES)
    logits = jax.ShapeDtypeStruct((2, 3, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    try:
        losses = jax.eval_shape(partial(_by_name, own), logits, targets)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        what = "loss= asks for the value of an array while the step is compiled"
        raise ConfigError(
            what, fix=f"only jax.numpy, and jnp.where instead of if: {TAKES}"
        ) from None
    for name in losses:
        if name in others:
            raise ConfigError(f"loss= gives {name!r}, another figure of a step", fix="another name")
    _check_alone(own, vocab)


def _check_alone(own: TokenLoss, vocab: int) -> None:
    """Raises ConfigError if a token's loss depends on the other tokens in the call.

    Layouts and microbatches decide which tokens a call sees, so such a loss would train a
    different model on each.
    """
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (2, 2, vocab)).astype(np.float32)
    targets = random.integers(0, vocab, (2, 2), np.int32)
    of_tokens = jax.jit(partial(_by_name, own))
    among = of_tokens(logits, targets)
    for row, time in np.ndindex(2, 2):
        here = np.s_[row : row + 1, time : time + 1]
        alone = of_tokens(logits[here], targets[here])
        for name, loss in among.items():
            beside, by_itself = float(loss[row, time]), float(alone[name][0, 0])
            if abs(beside - by_itself) > SAME_LOSS * max(abs(beside), abs(by_itself)):
                raise ConfigError(
                    f"loss= gives a token {name}={beside:.4g} among others, {by_itself:.4g} alone",
                    fix="a loss of its own logits and target: a call sees a part of the tokens",
                )


@part("head")
def _sum_cross_entropy(
    options: dict[str, Any],
    hidden_bte,
    table_ve,
    targets_bt,
    mask_bt,
    axis_name,
    part_bn=None,
) -> Losses:
    total, z_total, *parts = linear_cross_entropy(
        hidden_bte,
        table_ve,
        targets_bt,
        mask=mask_bt,
        axis_name=axis_name,
        with_z_loss=True,
        parts=part_bn,
        is_local=True,
        **options,
    )
    losses = {"loss": total}
    if options.get("z_loss"):
        # Reported separately, so that `loss` stays comparable; the gradient of both is in the
        # first.
        losses = {"loss": total - z_total, "z_loss": z_total}
    for parts_n in parts:
        losses["loss"] = jnp.concatenate([losses["loss"][None], parts_n])
    return losses


@part("head")
def _sum_own(  # noqa: PLR0913 - arrays of a head, and what shapes its loss
    own: TokenLoss,
    training: bool,
    options: dict[str, Any],
    hidden_bte,
    table_ve,
    targets_bt,
    mask_bt,
    axis_name,
    part_bn=None,
) -> Losses:
    def losses(logits_btv, targets_bt):
        by_name = _by_name(own, logits_btv, targets_bt)
        return by_name if training else {"loss": by_name["loss"]}

    from pallas_kernels.loss.own import linear_token_loss

    return linear_token_loss(
        hidden_bte,
        table_ve,
        targets_bt,
        losses,
        mask_bt=mask_bt,
        axis_name=axis_name,
        part_bn=part_bn,
        **options,
    )


def _by_name(own: TokenLoss, logits_btv: jax.Array, targets_bt: jax.Array) -> Losses:
    """Returns the losses that `own` gives, in float32 and by name.

    Raises ConfigError if it returns anything else.
    """
    returned = own(logits_btv, targets_bt)
    losses = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    if "loss" not in losses:
        raise ConfigError(f"loss= gives {sorted(losses)} and no 'loss'", fix=TAKES)
    for name, loss_bt in losses.items():
        shape = jnp.shape(loss_bt)
        if shape != targets_bt.shape:
            raise ConfigError(
                f"loss= gives {name!r} of shape {shape} for targets {targets_bt.shape}", fix=TAKES
            )
        if not jnp.issubdtype(jnp.result_type(loss_bt), jnp.floating):
            dtype = jnp.result_type(loss_bt)
            raise ConfigError(f"loss= gives {name!r} of {dtype}", fix="losses of a floating dtype")
    return {name: jnp.asarray(loss_bt, jnp.float32) for name, loss_bt in losses.items()}
