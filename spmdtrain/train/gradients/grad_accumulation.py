"""Computes gradients without a pipeline: one microbatch after another, then one reduction over the
shards.

All of it runs in one region that is manual over the axes of the batch. A weight sharded over such
an axis (`fsdp`) is gathered by the layer that uses it, and its gradient is scattered by the same
layer, in each microbatch. All other gradients are accumulated locally and reduced once a step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.partition import axes_of
from spmdtrain.models.abstract import cast_floating
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import sum_losses
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.parallel.feedback.sums import Feedback
from spmdtrain.parallel.gather import gather_over
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.parallel.specs import keep_axes
from spmdtrain.train.batch import Batch
from spmdtrain.train.gradients.forward import gather_layer_of, make_context, make_head_losses
from spmdtrain.train.gradients.forward import make_segment_sums as segment_sums_of_head
from spmdtrain.train.gradients.further_losses import make_further_losses
from spmdtrain.train.gradients.reduction import (
    add_copies,
    feedback_specs,
    mean_gradients,
    sending_of,
    zero_gradients,
)
from spmdtrain.train.gradients.sums import (
    count_tokens,
    join_losses,
    number_of,
    objective,
    sum_over_shards,
    total_of,
)
from spmdtrain.train.setup import Setup
from spmdtrain.train.token_loss import Losses

BATCH = P(None, BATCH_AXES)  # of a batch's arrays [accumulation, sequences, ...]


def make_gradients(setup: Setup) -> Callable[..., Any]:
    """Returns `(params, step, batch, cotangent, feedback) -> (gradients of the mean objective,
    sums, new feedback)`.

    The backward pass starts from `cotangent`, a float32 scalar, and gradients are divided by it at
    the end; None: 1. Gradients and sums are over all microbatches and shards. `sums`: tokens
    (unmasked), loss, and the other losses of the head and the blocks; float32 scalars, or vectors
    as `means` takes them. The objective is the sum of all losses. `feedback`: what compressed
    gradients of the steps before have left; None: they are summed in full.
    """
    accumulate = setup.config.precision.accumulate
    context = make_context(setup)
    forward = _make_forward(setup, training=True)

    def minimised(trained, fixed, microbatch: Batch, step, cotangent):
        losses = forward(fixed | trained, microbatch, context(microbatch, step))
        total = objective(losses)
        if cotangent is not None:
            total = total * cotangent
        return total, losses | count_tokens(setup, microbatch, training=True)

    def of_microbatch(weights, microbatch: Batch, step, cotangent):
        find = jax.value_and_grad(minimised, has_aux=True)
        (_, sums), gradients = find(*weights, microbatch, step, cotangent)
        return setup.model.cast(gradients, accumulate), sums

    def accumulated(weights, step, batch: Batch, cotangent):
        first = {name: x[0] for name, x in batch.items()}
        if batch["tokens"].shape[0] == 1:
            return of_microbatch(weights, first, step, cotangent)
        shapes = jax.eval_shape(of_microbatch, weights, first, step, cotangent)[1]
        no_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(totals, microbatch):
            found = of_microbatch(weights, microbatch, step, cotangent)
            return jax.tree.map(jnp.add, totals, found), None

        trained, _ = weights
        totals, _ = jax.lax.scan(add, (zero_gradients(setup, trained), no_sums), batch)
        return totals

    def local(params, step, batch: Batch, cotangent, feedback):
        weights = add_copies(setup, _over_data(setup, params))
        split = setup.model.split_trained(weights)
        gradients, sums = accumulated(split, step, batch, cotangent)
        sums = sum_over_shards(sums, setup.rules)
        number, sending = total_of(number_of(sums)), sending_of(feedback, step)
        means, left = mean_gradients(setup, gradients, number, cotangent, sending)
        return means, sums, left

    resting = _resting(setup)
    trained, _ = setup.model.split_trained(resting)

    def run(params, step, batch: Batch, cotangent=None, feedback: Feedback | None = None):
        kept = feedback_specs(setup, feedback)
        in_specs = (resting, P(), BATCH, P(), kept)
        out_specs = (trained, P(), kept)
        region = manual_region(local, setup.mesh, MANUAL_AXES, in_specs, out_specs)
        return region(params, step, batch, cotangent, feedback)

    return run


def make_losses(setup: Setup) -> Callable[..., Any]:
    """Returns `(params, batch) -> sums`, with the sums of `make_gradients`, without dropout."""
    context = make_context(setup)
    forward = _make_forward(setup, training=False)

    def local(params, batch: Batch):
        weights = add_copies(setup, _over_data(setup, params))

        def one(_, microbatch):
            losses = forward(weights, microbatch, context(microbatch))
            return None, losses | count_tokens(setup, microbatch, training=False)

        _, sums = jax.lax.scan(one, None, batch)
        return sum_over_shards(jax.tree.map(jnp.sum, sums), setup.rules)

    return manual_region(local, setup.mesh, MANUAL_AXES, (_resting(setup), BATCH), P())


def make_segment_sums(setup: Setup) -> Callable[..., jax.Array]:
    """Returns `(params, batch) -> float32 [accumulation, sequences, segments]`, without dropout.

    The result has the log-probabilities of segments: see `forward.make_segment_sums`.
    """
    context = make_context(setup)
    stream = _make_stream(setup)
    of_head = segment_sums_of_head(setup)

    def local(params, batch: Batch):
        weights = add_copies(setup, _over_data(setup, params))

        def one(_, microbatch):
            ctx = context(microbatch)
            module, x_bte, _ = stream(weights, microbatch, ctx)
            return None, of_head(module, x_bte, ctx, microbatch)

        return jax.lax.scan(one, None, batch)[1]

    return manual_region(local, setup.mesh, MANUAL_AXES, (_resting(setup), BATCH), BATCH)


def _resting(setup: Setup) -> dict[str, P]:
    """Returns the specs of weights and of their gradients at the border of the region."""
    return {path: keep_axes(MANUAL_AXES, spec) for path, spec in setup.specs.items()}


def _over_data(setup: Setup, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gathers over `data` the parameters that ZeRO-1 splits.

    This happens once a step, in compute precision.
    """
    if not setup.config.train.zero:
        return params

    def whole(path: str, x: jax.Array) -> jax.Array:
        spec = setup.specs[path]
        if "data" not in axes_of(spec):
            return x
        compute = setup.model.dtype(path, setup.config.precision.compute)
        in_compute = cast_floating(x, compute)
        gathered = gather_over(("data",), spec, in_compute)
        gathered = setup.padding.rest_to_use(path, gathered)
        # A gradient has the dtype of its parameter. One that a layer scatters is a sum over
        # devices, which must not be rounded to compute precision on its way back.
        return gathered.astype(x.dtype) if setup.gathered[path] else gathered

    return {path: whole(path, x) for path, x in params.items()}


def _make_forward(setup: Setup, *, training: bool) -> Callable[..., Losses]:
    """Returns `forward(params, microbatch, ctx) -> losses`, in compute precision."""
    head_losses = make_head_losses(setup, training=training)
    further_losses = make_further_losses(setup) if training else None
    stream = _make_stream(setup)

    def forward(params, microbatch: Batch, ctx: ForwardContext) -> Losses:
        module, x_bte, side_losses = stream(params, microbatch, ctx)
        if further_losses is not None:
            further = further_losses(module, x_bte, ctx, microbatch)
            side_losses = sum_losses(side_losses, further)
        return join_losses(head_losses(module, x_bte, ctx, microbatch), side_losses)

    return forward


def _make_stream(setup: Setup) -> Callable[..., tuple[Any, jax.Array, Losses]]:
    """Returns `stream(params, microbatch, ctx) -> (module, x_bte, side losses)`, the model up to
    the head.
    """
    gather = gather_layer_of(setup)

    def stream(params, microbatch: Batch, ctx: ForwardContext):
        here = {path: x for path, x in params.items() if not setup.gathered[path]}
        # A layer that gathers a weight also casts it.
        values = params | setup.model.cast(here, setup.config.precision.compute)
        module = setup.model.bind(values, gather)
        x_bte, side_losses = module.blocks(module.embed(microbatch["tokens"], ctx), ctx)
        return module, x_bte, side_losses

    return stream
