"""Computes a step's scales from earlier steps, and collects the magnitudes of its matmuls.

Scales are the same on all devices, because magnitudes are the largest of all devices and
microbatches before they reach the state. A weight is the same in all microbatches: its scale comes
from itself, once a step, and nothing of it is remembered.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.models.abstract import Scaling
from spmdtrain.parallel.axes import BATCH_AXES, axes_of_dim
from spmdtrain.parallel.matmuls.float8 import GRADIENTS, VALUES, scale_of
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.part import Params, Part, Reading, Slots
from spmdtrain.train.scaling.magnitudes import ITEM, NAME, History
from spmdtrain.train.setup import Setup

Arrays = dict[str, jax.Array]  # by dotted path of the weights whose matmul has a history


def scales_of(
    params: Mapping[str, jax.Array], history: History | None, cotangent: jax.Array | None
) -> Arrays:
    """Returns the scales of a step, float32 [*stack, 3]: of values, weights and gradients.

    `params`: at rest, outside the manual region. `cotangent`: where the backward pass starts, if
    not from 1. Without a history there are none. Where it is empty, as in the first step, values
    and gradients are taken as they are: every other step would pay for finding their scale.
    """

    def scales(path: str, earlier: jax.Array) -> jax.Array:
        weight = params[path]
        finite = jnp.where(jnp.isfinite(weight), jnp.abs(weight), 0)
        of_weight = finite.max(range(earlier.ndim - 2, weight.ndim)).astype(jnp.float32)
        of_values, of_gradients = jnp.moveaxis(earlier.max(-2), -1, 0)
        values, weights = scale_of(of_values, VALUES), scale_of(of_weight, VALUES)
        gradients = scale_of(of_gradients, GRADIENTS)
        if cotangent is not None:
            gradients = gradients * cotangent
        return jnp.stack([values, weights, gradients], -1)

    return {path: scales(path, earlier) for path, earlier in (history or {}).items()}


def slots_of(setup: Setup, scales: Mapping[str, jax.Array]) -> Arrays:
    """Returns zeros [*stack, c, p, 2] for what matmuls with these scales see: see `Operand`.

    They are made inside the manual region. There are c parts of the tokens of a sequence, and p
    along the other mesh axes that are left to XLA, so that no layer waits for another device.
    """
    sizes = setup.rules.sizes
    _, over_time = setup.rules.activation_spec(("batch", "time"), (0, 0), drop=MANUAL_AXES)
    time = axes_of_dim(over_time)
    taken = (*MANUAL_AXES, *time)
    others = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in taken)
    parts = [math.prod(sizes[axis] for axis in axes) for axes in (time, others)]

    def zeros(of_weight: jax.Array) -> jax.Array:
        stack = of_weight.shape[:-1]
        spec = P(*[None] * len(stack), time or None, others or None, None)
        return jax.lax.with_sharding_constraint(jnp.zeros((*stack, *parts, 2)), spec)

    return {path: zeros(scale) for path, scale in scales.items()}


def scaling_of(scales: Mapping[str, jax.Array], slots: Mapping[str, jax.Array]) -> Scaling:
    """Returns the (scales, slots) of each weight, to which the model is bound."""
    return {path: (scales[path], slots[path]) for path in scales}


def largest_of(
    setup: Setup, magnitudes: Mapping[str, jax.Array], cotangent: jax.Array | None
) -> Arrays:
    """Returns the largest magnitudes [*stack, 2] on any device, from those in the slots of each.

    Inside the manual region; gradients are divided by the cotangent.
    """
    axes = tuple(axis for axis in BATCH_AXES if setup.rules.sizes[axis] > 1)

    def largest(of_parts: jax.Array) -> jax.Array:
        of_device = of_parts.max((-3, -2))
        of_all = jax.lax.pmax(of_device, axes) if axes else of_device
        if cotangent is None:
            return of_all
        return of_all / jnp.stack([jnp.ones_like(cotangent), cotangent])

    return {path: largest(slots) for path, slots in magnitudes.items()}


def _make_reading(setup: Setup) -> Reading:
    """Makes the reading of a step's scales, which only its matmuls see."""

    def arrays(params: Params, inputs: StepInputs) -> Arrays | None:
        return scales_of(params, inputs.items.get(NAME), inputs.cotangent) or None

    def seen(slots: Arrays, cotangent: jax.Array | None) -> dict[str, Arrays]:
        return {NAME: largest_of(setup, slots, cotangent)}

    slots = Slots(partial(slots_of, setup), scaling_of, seen)
    return Reading(arrays, P(), in_use=None, slots=slots)


MAGNITUDES = Part(NAME, items=(ITEM,), make_reading=_make_reading)
