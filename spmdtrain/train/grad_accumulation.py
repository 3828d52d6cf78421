"""Gradients without a pipeline: microbatches one after the other, then one reduction over `data`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.models.abstract import cast, make_gather
from spmdtrain.models.context import ForwardContext
from spmdtrain.parallel.regions import manual_region
from spmdtrain.parallel.specs import keep_axes
from spmdtrain.train.batch import Batch
from spmdtrain.train.loss import (
    head_loss,
    make_context,
    mean_gradients,
    sum_over_shards,
    zero_gradients,
)
from spmdtrain.train.setup import Setup

Sums = dict[str, jax.Array]
BATCH = P(None, "data")  # of a batch's arrays [accumulation, sequences, ...]


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
        gradients, sums = accumulated(params, step, batch)
        sums = _over_shards(setup, sums)
        return mean_gradients(setup, gradients, sums["tokens"]), sums

    specs = {path: keep_axes(setup.manual, spec) for path, spec in setup.gradient_specs.items()}
    return manual_region(local, setup.mesh, setup.manual, (P(), P(), BATCH), (specs, P()))


def make_losses(setup: Setup) -> Callable[..., Any]:
    """`(params, batch) -> sums`, as `make_gradients` has them, without dropout."""
    context = make_context(setup)

    def local(params, batch: Batch):
        def one(_, microbatch):
            return None, _forward(setup, params, microbatch, context(microbatch))

        _, sums = jax.lax.scan(one, None, batch)
        return _over_shards(setup, jax.tree.map(jnp.sum, sums))

    return manual_region(local, setup.mesh, setup.manual, (P(), BATCH), P())


def _forward(setup: Setup, params, microbatch: Batch, ctx: ForwardContext) -> Sums:
    """One microbatch through the model, in compute precision."""
    values = cast(params, setup.config.precision.compute)
    module = setup.model.bind(values, make_gather(setup.rules, setup.manual))
    x_bte, side_loss = module.blocks(module.embed(microbatch["tokens"], ctx), ctx)
    loss = head_loss(module, x_bte, ctx, microbatch, setup.rules)
    sums = {"loss": loss, "tokens": microbatch["mask"].astype(jnp.float32).sum()}
    if side_loss is not None:
        sums["side_loss"] = side_loss
    return sums


def _over_shards(setup: Setup, sums: Sums) -> Sums:
    return sum_over_shards(sums["loss"], sums.get("side_loss"), sums["tokens"], setup.rules)
