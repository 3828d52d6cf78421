"""Gradients without a pipeline: microbatches one after the other, then one reduction over the shards.

One region, manual over all axes of the batch. A weight that rests split over such an axis (`fsdp`) is
gathered by the layer that uses it, and its gradient scattered back by the same layer, once a
microbatch. All other gradients are accumulated where they are and summed once a step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.models.abstract import cast
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel.axes import BATCH_AXES
from spmdtrain.parallel.gather import gather_over, gathered_axes
from spmdtrain.parallel.regions import MANUAL_AXES, manual_region
from spmdtrain.parallel.specs import keep_axes
from spmdtrain.train.batch import Batch
from spmdtrain.train.loss import (
    head_loss,
    make_context,
    make_layer_gather,
    mean_gradients,
    sum_over_shards,
    zero_gradients,
)
from spmdtrain.train.setup import Setup

Sums = dict[str, jax.Array]
BATCH = P(None, BATCH_AXES)  # of a batch's arrays [accumulation, sequences, ...]


def make_gradients(setup: Setup) -> Callable[..., Any]:
    """`(params, step, batch) -> (gradients of the mean objective, sums)`.

    Over all microbatches and shards. sums: loss, tokens (unmasked) and, where blocks have one,
    side_loss; float32 scalars.
    """
    accumulate = setup.config.precision.accumulate
    context = make_context(setup)

    def objective(params, microbatch: Batch, step):
        sums = _forward(setup, params, microbatch, context(microbatch, step))
        return sums["loss"] + sums.get("side_loss", 0), sums

    def of_microbatch(params, microbatch: Batch, step):
        (_, sums), gradients = jax.value_and_grad(objective, has_aux=True)(params, microbatch, step)
        return cast(gradients, accumulate), sums

    def accumulated(params, step, batch: Batch):
        first = {name: x[0] for name, x in batch.items()}
        if batch["tokens"].shape[0] == 1:
            return of_microbatch(params, first, step)
        shapes = jax.eval_shape(of_microbatch, params, first, step)[1]
        no_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(totals, microbatch):
            return jax.tree.map(jnp.add, totals, of_microbatch(params, microbatch, step)), None

        totals, _ = jax.lax.scan(add, (zero_gradients(setup, params), no_sums), batch)
        return totals

    def local(params, step, batch: Batch):
        gradients, sums = accumulated(_over_data(setup, params), step, batch)
        sums = _over_shards(setup, sums)
        return mean_gradients(setup, gradients, sums["tokens"]), sums

    specs = {path: keep_axes(MANUAL_AXES, spec) for path, spec in setup.specs.items()}
    in_specs = (_resting(setup), P(), BATCH)
    return manual_region(local, setup.mesh, MANUAL_AXES, in_specs, (specs, P()))


def make_losses(setup: Setup) -> Callable[..., Any]:
    """`(params, batch) -> sums`, as `make_gradients` has them, without dropout."""
    context = make_context(setup)

    def local(params, batch: Batch):
        params = _over_data(setup, params)

        def one(_, microbatch):
            return None, _forward(setup, params, microbatch, context(microbatch))

        _, sums = jax.lax.scan(one, None, batch)
        return _over_shards(setup, jax.tree.map(jnp.sum, sums))

    return manual_region(local, setup.mesh, MANUAL_AXES, (_resting(setup), BATCH), P())


def _resting(setup: Setup) -> dict[str, P]:
    """Weights come into the region as they rest, each device's own part."""
    return {path: keep_axes(MANUAL_AXES, spec) for path, spec in setup.specs.items()}


def _over_data(setup: Setup, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters whole over `data`: with ZeRO-1 they are gathered once a step, in compute precision."""
    if not setup.config.train.zero:
        return params

    def whole(path: str, x: jax.Array) -> jax.Array:
        spec = setup.specs[path]
        if "data" not in spec:
            return x
        gathered = gather_over(("data",), spec, x.astype(setup.config.precision.compute))
        # A gradient has the dtype of its parameter. One that a layer scatters is a sum over devices,
        # which must not be rounded to compute precision on its way back.
        return gathered.astype(x.dtype) if gathered_axes(spec) else gathered

    return {path: whole(path, x) for path, x in params.items()}


def _forward(setup: Setup, params, microbatch: Batch, ctx: ForwardContext) -> Sums:
    """One microbatch through the model, in compute precision."""
    here = {path: x for path, x in params.items() if not gathered_axes(setup.specs[path])}
    values = params | cast(here, setup.config.precision.compute)  # a gather casts by itself
    module = setup.model.bind(values, make_layer_gather(setup))
    x_bte, side_loss = module.blocks(module.embed(microbatch["tokens"], ctx), ctx)
    loss = head_loss(module, x_bte, ctx, microbatch, setup.rules)
    sums = {"loss": loss, "tokens": microbatch["mask"].astype(jnp.float32).sum()}
    if side_loss is not None:
        sums["side_loss"] = side_loss
    return sums


def _over_shards(setup: Setup, sums: Sums) -> Sums:
    return sum_over_shards(sums["loss"], sums.get("side_loss"), sums["tokens"], setup.rules)
