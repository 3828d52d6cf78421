"""One training step. The order of this file is the order of the step.

Forward, backward and gradient reduction run in one `shard_map`, manual over `pipeline` and `data`, automatic over the
other axes: gradients gather over microbatches on each data shard and cross `data` once. Clipping and the optimizer run
outside, on global arrays: a layer-wise rule on local shards would be silently wrong.

A batch is a dict of arrays [accumulation, sequences, time] (`sample`: [accumulation, sequences]).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.blueprint import Blueprint, cast, gathering
from spmdtrain.models.flow import Flow, sample_noise
from spmdtrain.parallel.axes import BATCH_AXES, MANUAL_AXES, Rules, placement
from spmdtrain.parallel.reduce import reduced, summed
from spmdtrain.parallel.vocabulary import lookup
from spmdtrain.train import optimizer
from spmdtrain.train.loss import cross_entropy
from spmdtrain.train.state import TrainState, abstract_state, gradient_specs, scatter_dims

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def batch_sharding(mesh: Mesh, rules: Rules, name: str) -> NamedSharding:
    """Of the batch entry `name`: sequences over data x fsdp x expert, time as the activation table says."""
    time = rules.activation_spec(("time",), (0,)) if name != "sample" else ()
    return NamedSharding(mesh, P(None, BATCH_AXES, *time))


def make_step(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """`step(state, batch) -> (state, metrics)`, jitted, state donated. Metrics: loss (mean over the unmasked tokens of
    the whole batch), grad_norm (before clipping), learning_rate, tokens (unmasked)."""
    gradients = _gradient_function(config, blueprint, mesh, rules)
    moments = {path: NamedSharding(mesh, spec) for path, spec in gradient_specs(config, blueprint, rules).items()}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, loss, tokens = gradients(state.params, state.step, batch)
        grads, norm = optimizer.clipped(grads, config.train.clip)
        directions, opt_state = optimizer.directions(
            config.optimizer, blueprint.parameters, grads, state.opt_state, state.params
        )
        rate = optimizer.learning_rate(config.optimizer, config.train.steps, state.step)

        def moved(path):  # stepped where the moments live, gathered (ZeRO-1) by the output sharding
            x = state.params[path]
            new = x - (rate * directions[path].astype(jnp.float32)).astype(x.dtype)
            return jax.lax.with_sharding_constraint(new, moments[path])

        params = {path: moved(path) for path in state.params}
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens": tokens}
        return TrainState(state.step + 1, params, opt_state), metrics

    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(config, blueprint, mesh, rules))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """`evaluate(params, batch) -> (sum of token losses, number of unmasked tokens)`, without dropout."""

    def local(params, batch):
        def one(_, part):
            model, flow = _bound(config, blueprint, rules, params, part)
            return None, _token_losses(model, flow, part)

        _, (losses, tokens) = jax.lax.scan(one, None, batch)
        return summed((losses.sum(), tokens.sum()), rules.sizes["data"])

    return jax.jit(_manual(local, mesh, in_specs=(P(), P(None, "data")), out_specs=P()))


def _gradient_function(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules):
    """`(params, step, batch) -> (gradients of the mean loss, mean loss, tokens)` over all microbatches and shards."""
    dims = scatter_dims(config, blueprint, rules)
    specs = gradient_specs(config, blueprint, rules)
    resting = {path: _without(MANUAL_AXES, spec) for path, spec in specs.items()}
    accumulate, data = config.precision.accumulate, rules.sizes["data"]

    def total_loss(params, part, step):
        model, flow = _bound(config, blueprint, rules, params, part, step)
        return _token_losses(model, flow, part)

    def local(params, step, batch):
        def microbatch(part):
            (losses, tokens), grads = jax.value_and_grad(total_loss, has_aux=True)(params, part, step)
            return cast(grads, accumulate), losses, tokens

        accumulation = batch["tokens"].shape[0]
        if accumulation == 1:
            total = microbatch({name: x[0] for name, x in batch.items()})
        else:
            zeros = {
                path: jax.lax.with_sharding_constraint(jnp.zeros(x.shape, accumulate), resting[path])
                for path, x in params.items()
            }
            add = lambda total, part: (jax.tree.map(jnp.add, total, microbatch(part)), None)  # noqa: E731
            total, _ = jax.lax.scan(add, (zeros, jnp.float32(0), jnp.float32(0)), batch)
        grads, losses, tokens = total
        losses, tokens = summed((losses, tokens), data)
        count = jnp.maximum(tokens, 1)
        grads = reduced(grads, dims, data)
        return {path: (g / count).astype(g.dtype) for path, g in grads.items()}, losses / count, tokens

    out_specs = ({path: _only(MANUAL_AXES, spec) for path, spec in specs.items()}, P(), P())
    return _manual(local, mesh, in_specs=(P(), P(), P(None, "data")), out_specs=out_specs)


def _bound(config, blueprint, rules, params, part, step=None) -> tuple[nnx.Module, Flow]:
    """The model in compute dtype and the flow of one microbatch; with `step` given, dropout is on."""
    tokens_bt = part["tokens"]
    positions = part.get("positions")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens_bt.shape[1], dtype=jnp.int32), tokens_bt.shape)
    noisy = step is not None and config.model.dropout > 0
    gather = gathering(rules, MANUAL_AXES)
    flow = Flow(
        positions_bt=positions,
        segments_bt=part.get("segment_ids"),
        place=placement(rules, MANUAL_AXES),
        lookup=lookup(rules, MANUAL_AXES),
        gather=gather,
        remat=config.train.remat,
        dropout=config.model.dropout,
        noise_b=sample_noise(config.train.seed, step, part["sample"]) if noisy else None,
    )
    return blueprint.bind(cast(params, config.precision.compute), gather), flow


def _token_losses(model, flow: Flow, part: Batch) -> tuple[jax.Array, jax.Array]:
    """Sum of the losses of the unmasked tokens and their number, both float32."""
    x_bte = model.blocks(model.embed(part["tokens"], flow), flow)
    hidden_bte, table_ve = model.head(x_bte, flow)
    mask_bt = part["mask"].astype(jnp.float32)
    return cross_entropy(hidden_bte, table_ve, part["targets"], mask_bt, flow.place), mask_bt.sum()


def _manual(function, mesh: Mesh, in_specs, out_specs):
    # check_vma off: gradients are taken inside the region, where parameters must not be summed over `data` again.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(MANUAL_AXES), check_vma=False
    )


def _only(axes, spec: P) -> P:
    """`spec` with nothing but `axes`."""
    return P(*(_filtered(part, lambda axis: axis in axes) for part in spec))


def _without(axes, spec: P) -> P:
    return P(*(_filtered(part, lambda axis: axis not in axes) for part in spec))


def _filtered(part, keep):
    names = tuple(axis for axis in (part if isinstance(part, tuple) else (part,)) if axis and keep(axis))
    return names if len(names) > 1 else names[0] if names else None
