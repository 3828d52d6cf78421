"""Scales the loss dynamically, for float16 (Micikevicius et al. 2018, arXiv:1710.03740).

It overflows above 65504 and underflows below 6e-8. The backward pass starts from the scale instead
of from 1, so that small gradients do not vanish, and gradients are divided by it in float32 once
they are reduced. If one of them is not finite, the scale was too large: the step leaves every bit
of the state unchanged, and the scale halves. After `precision.loss_scale_steps` consecutive good
steps it doubles.

The scale applies to the mean loss of a batch. Losses are sums over tokens here, so a backward pass
starts from the scale over the tokens of a step, as in `cotangent`. The losses themselves are never
scaled.

Once the scale is at `LEAST`, a non-finite gradient (or a non-finite loss at any scale) is a bad
step, and `[guard]` decides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import PrecisionConfig, RunConfig
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.items.item import Item, Note, Start, Taken, whole
from spmdtrain.train.part import Part
from spmdtrain.train.setup import Setup

LEAST = 1.0
MOST = 2.0**32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, and the number of good steps since it last changed.

    They are a float32 scalar and an int32 scalar. A good step has finite gradients.
    """

    scale: jax.Array
    good_steps: jax.Array


def begin(precision: PrecisionConfig) -> LossScale | None:
    """Returns the scale of the first step, or None if nothing is computed in float16."""
    if precision.loss_scale is None:
        return None
    return LossScale(jnp.float32(precision.loss_scale), jnp.int32(0))


def cotangent(config: RunConfig, loss_scale: LossScale) -> jax.Array:
    """Returns the cotangent of the sum of all losses, a float32 scalar.

    It is the scale over the tokens of a batch, rounded to a power of two, the same in every layout.
    Where the loss takes the mean over an answer's tokens, their gradients have been divided by
    their number: it is the scale over the sequences.
    """
    train = config.train
    number = train.global_batch * (1 if train.averages_answers else train.sequence_length)
    return loss_scale.scale * 2.0 ** -round(math.log2(number))


def _make_inputs(setup: Setup) -> Callable[[StepInputs], StepInputs]:
    """Returns inputs whose backward pass starts from the scale, if the state has one."""

    def scaled(inputs: StepInputs) -> StepInputs:
        loss_scale = inputs.items.get(ITEM.name)
        if loss_scale is None:
            return inputs
        return inputs._replace(cotangent=cotangent(setup.config, loss_scale))

    return scaled


def is_too_large(loss_scale: LossScale, loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """Returns True if the scale made a gradient non-finite.

    `grad_norm` is the norm of the unscaled gradients.
    """
    return jnp.isfinite(loss) & ~jnp.isfinite(grad_norm) & (loss_scale.scale > LEAST)


def after_step(
    loss_scale: LossScale, precision: PrecisionConfig, loss: jax.Array, grad_norm: jax.Array
) -> LossScale:
    """Returns the scale for the step after one with this loss and gradient norm."""
    assert precision.loss_scale_steps is not None, "float16 has some"
    scale = loss_scale.scale
    good_steps = jnp.where(jnp.isfinite(grad_norm), loss_scale.good_steps + 1, 0)
    grows = good_steps >= precision.loss_scale_steps
    grown = jnp.where(grows, jnp.minimum(2 * scale, MOST), scale)
    halved = jnp.maximum(scale / 2, LEAST)
    too_large = is_too_large(loss_scale, loss, grad_norm)
    return LossScale(jnp.where(too_large, halved, grown), jnp.where(grows, 0, good_steps))


def _update(loss_scale: LossScale, taken: Taken) -> LossScale:
    return after_step(loss_scale, taken.config.precision, taken.loss, taken.grad_norm)


def _scale(loss_scale: LossScale, taken: Taken) -> jax.Array:  # noqa: ARG001
    return loss_scale.scale


def _overflow(loss_scale: LossScale, taken: Taken) -> jax.Array:
    return is_too_large(loss_scale, taken.loss, taken.grad_norm).astype(jnp.float32)


def values_of(loss_scale: LossScale) -> list[float]:
    """Returns the scale and its good steps as JSON, in which float32 is exact."""
    return [float(loss_scale.scale), int(loss_scale.good_steps)]


def scale_of(values: list[float], like: LossScale) -> LossScale:
    """Reverses `values_of`; the result still holds Python's numbers."""
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _begin(start: Start) -> LossScale | None:
    return begin(start.config.precision)


ITEM = Item(
    "loss_scale",
    begin=_begin,
    rests=whole,
    update=_update,
    figures={"loss_scale": _scale, "overflow": _overflow},
    when_skipped="update",
    note=Note(values_of, scale_of),
)
LOSS_SCALE = Part("loss scale", items=(ITEM,), make_inputs=_make_inputs)
