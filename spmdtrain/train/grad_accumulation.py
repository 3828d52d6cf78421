"""Gradients without a pipeline: microbatches one after the other, then one reduction over `data`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import Blueprint, cast, gathering
from spmdtrain.models.context import Flow
from spmdtrain.parallel.axes import Rules, manual_axes
from spmdtrain.parallel.reduce import reduced, summed
from spmdtrain.train.loss import Batch, head_loss, make_flow, manually, only, without
from spmdtrain.train.state import crossings, gradient_specs


def make_gradients(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """`(params, step, batch) -> (gradients of the mean objective, sums)` over all microbatches and shards; sums:
    loss, tokens (unmasked) and, where blocks have one, side_loss."""
    manual = manual_axes(rules.sizes)
    specs, ways = gradient_specs(config, blueprint, rules), crossings(config, blueprint, rules)
    resting = {path: without(manual, spec) for path, spec in specs.items()}
    flow_of, gather, accumulate = make_flow(config, rules), gathering(rules, manual), config.precision.accumulate

    def objective(params, part, step):
        model = blueprint.bind(cast(params, config.precision.compute), gather)
        sums = _sums(model, flow_of(part, step), part, rules)
        return sums["loss"] + sums.get("side_loss", 0), sums

    def local(params, step, batch):
        def microbatch(part):
            (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params, part, step)
            return cast(grads, accumulate), sums

        first = {name: x[0] for name, x in batch.items()}
        if batch["tokens"].shape[0] == 1:
            grads, sums = microbatch(first)
        else:
            zeros = {
                path: jax.lax.with_sharding_constraint(jnp.zeros(x.shape, accumulate), resting[path])
                for path, x in params.items()
            }
            none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(microbatch, first)[1])
            add = lambda total, part: (jax.tree.map(jnp.add, total, microbatch(part)), None)  # noqa: E731
            (grads, sums), _ = jax.lax.scan(add, (zeros, none), batch)
        sums = summed(sums, _axes(rules))
        grads, count = reduced(grads, ways, resting), jnp.maximum(sums["tokens"], 1)
        return {path: (g / count).astype(g.dtype) for path, g in grads.items()}, sums

    out_specs = ({path: only(manual, spec) for path, spec in specs.items()}, P())
    return manually(local, mesh, manual, in_specs=(P(), P(), P(None, "data")), out_specs=out_specs)


def make_losses(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """`(params, batch) -> sums`, as `make_gradients` has them, without dropout."""
    manual = manual_axes(rules.sizes)
    flow_of, gather = make_flow(config, rules), gathering(rules, manual)

    def local(params, batch):
        def one(_, part):
            model = blueprint.bind(cast(params, config.precision.compute), gather)
            return None, _sums(model, flow_of(part), part, rules)

        _, sums = jax.lax.scan(one, None, batch)
        return summed(jax.tree.map(jnp.sum, sums), _axes(rules))

    return manually(local, mesh, manual, in_specs=(P(), P(None, "data")), out_specs=P())


def _sums(model: nnx.Module, flow: Flow, part: Batch, rules: Rules) -> dict[str, jax.Array]:
    x_bte, side = model.blocks(model.embed(part["tokens"], flow), flow)
    sums = {"loss": head_loss(model, x_bte, flow, part, rules), "tokens": part["mask"].astype(jnp.float32).sum()}
    return sums if side is None else sums | {"side_loss": side}


def _axes(rules: Rules) -> tuple[str, ...]:
    return ("data",) if rules.sizes["data"] > 1 else ()
