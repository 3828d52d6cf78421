"""Computes gradients without a pipeline: one microbatch after another, then one reduction over the
shards.

All of it runs in one region that is manual over the axes of the batch. A weight sharded over such
an axis (`fsdp`) is gathered by the layer that uses it, and its gradient is scattered by the same
layer, in each microbatch. All other gradients are accumulated locally and reduced once a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.models.abstract import Scaling
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import sum_losses
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.brought import Brought
from spmdtrain.train.gradients.forward import make_context, make_head_losses, make_side_losses
from spmdtrain.train.gradients.inputs import FindGradients, FoundGradients, StepInputs
from spmdtrain.train.gradients.reduction import (
    mean_gradients,
    summing_wide,
    zero_gradients,
)
from spmdtrain.train.gradients.stream import in_use, make_stream, resting_specs_in
from spmdtrain.train.gradients.sums import (
    count_tokens,
    join_losses,
    number_of,
    objective,
    sum_over_shards,
    take_measured,
    total_of,
)
from spmdtrain.train.part import Parts
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses

BATCH = P(None, BATCH_AXES)  # of a batch's arrays [accumulation, sequences, ...]


class Rest(NamedTuple):
    """The weights of a step that have no gradient, by path, and what its parts have brought, by the
    name of the part: what hooks read, and what belongs to slots.
    """

    fixed: dict[str, jax.Array]
    read: dict[str, Any]
    of_slots: dict[str, Any]


class Totals(NamedTuple):
    """The result of some microbatches: gradients, the slots of parts, and sums of losses."""

    gradients: dict[str, jax.Array]
    slots: dict[str, Any]
    sums: dict[str, jax.Array]

    def joined(self, other: "Totals") -> "Totals":
        """Returns the result of these microbatches and others: slots are never summed."""
        return Totals(
            jax.tree.map(jnp.add, self.gradients, other.gradients),
            jax.tree.map(jnp.maximum, self.slots, other.slots),
            jax.tree.map(jnp.add, self.sums, other.sums),
        )


def make_gradients(setup: Setup, parts: Parts) -> FindGradients:
    """Returns a function that finds the gradients of a step, over all microbatches and shards.

    They are divided by the cotangent from which the backward pass starts. Sums: tokens (unmasked),
    loss, and the other losses of the head and the blocks; float32 scalars, or vectors as `means`
    takes them. The objective is the sum of all losses. Arrays of parts have no gradient.
    """
    accumulate = setup.config.precision.accumulate
    context = make_context(setup, parts)
    forward = _make_forward(setup, parts, training=True)
    brought = Brought(setup, parts)

    def minimised(trained, slots, rest: Rest, microbatch: Batch, step, cotangent):
        scaling = brought.scaling(rest.of_slots, slots)
        ctx = context(microbatch, step, rest.read)
        losses = forward(rest.fixed | trained, microbatch, ctx, scaling)
        total = objective(losses, parts)
        if cotangent is not None:
            total = total * cotangent
        return total, losses | count_tokens(setup, microbatch, training=True)

    def of_microbatch(weights, microbatch: Batch, step, cotangent) -> Totals:
        find = jax.value_and_grad(minimised, (0, 1), has_aux=True)
        (_, sums), (gradients, slots) = find(*weights, microbatch, step, cotangent)
        return Totals(setup.model.cast(gradients, accumulate), slots, sums)

    def accumulated(weights, step, batch: Batch, cotangent) -> Totals:
        first = {name: x[0] for name, x in batch.items()}
        if batch["tokens"].shape[0] == 1:
            return of_microbatch(weights, first, step, cotangent)
        shapes = jax.eval_shape(of_microbatch, weights, first, step, cotangent).sums
        no_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(totals: Totals, microbatch):
            return totals.joined(of_microbatch(weights, microbatch, step, cotangent)), None

        trained, slots, _ = weights
        nothing = Totals(zero_gradients(setup, trained), slots, no_sums)
        totals, _ = jax.lax.scan(add, nothing, batch)
        return totals

    def local(params, step, batch: Batch, cotangent, arrays, of_slots):
        trained, fixed = setup.model.split_trained(in_use(setup, params))
        rest = Rest(fixed, brought.in_use(arrays), of_slots)
        weights = (trained, brought.slots(of_slots), rest)
        gradients, slots, sums = accumulated(weights, step, batch, cotangent)
        sums = sum_over_shards(sums, setup.rules)
        sums, measured = take_measured(sums)
        number, over_data = total_of(number_of(sums)), brought.over_data(arrays, step)
        means, made = mean_gradients(setup, gradients, number, cotangent, over_data)
        return means, sums, made, brought.seen(slots, cotangent), measured

    wide = summing_wide(setup, local)
    resting = resting_specs_in(setup)
    trained, _ = setup.model.split_trained(resting)

    def find(params: dict[str, jax.Array], inputs: StepInputs) -> FoundGradients:
        step, batch, cotangent, _ = inputs
        arrays, of_slots = brought.arrays(params, inputs), brought.of_slots(params, inputs)
        specs = brought.specs(arrays)
        in_specs = (resting, P(), BATCH, P(), specs, brought.specs(of_slots))
        out_specs = (trained, P(), brought.made_specs(specs), P(), P())
        region = manual_region(wide, setup.mesh, MANUAL_AXES, in_specs, out_specs)
        gradients, sums, made, seen, measured = region(
            params, step, batch, cotangent, arrays, of_slots
        )
        return FoundGradients(gradients, sums, {**made, **measured, **seen})

    return find


def make_losses(setup: Setup, parts: Parts) -> Callable[..., Any]:
    """Returns `(params, batch) -> sums`, with the sums of `make_gradients`, without dropout."""
    context = make_context(setup)
    forward = _make_forward(setup, parts, training=False)

    def local(params, batch: Batch):
        weights = in_use(setup, params)

        def one(_, microbatch):
            losses = forward(weights, microbatch, context(microbatch))
            return None, losses | count_tokens(setup, microbatch, training=False)

        _, sums = jax.lax.scan(one, None, batch)
        return sum_over_shards(jax.tree.map(jnp.sum, sums), setup.rules)

    specs = (resting_specs_in(setup), BATCH)
    return manual_region(summing_wide(setup, local), setup.mesh, MANUAL_AXES, specs, P())


def _make_forward(setup: Setup, parts: Parts, *, training: bool) -> Callable[..., Losses]:
    """Returns `forward(params, microbatch, ctx, scaling) -> losses`, in compute precision.

    `scaling`: of the weights whose scales come from earlier steps.
    """
    head_losses = make_head_losses(setup, parts, training=training)
    of_parts = make_side_losses(setup, parts) if training else None
    stream = make_stream(setup)

    def forward(
        params, microbatch: Batch, ctx: ForwardContext, scaling: Scaling | None = None
    ) -> Losses:
        module, x_bte, side_losses = stream(params, microbatch, ctx, scaling)
        if of_parts is not None:
            side_losses = sum_losses(side_losses, of_parts(module, x_bte, ctx, microbatch))
        return join_losses(setup, head_losses(module, x_bte, ctx, microbatch), side_losses)

    return forward
