"""One training step. The order of this file is the order of the step.

Forward, backward and gradient reduction run in one `shard_map`: grad_accumulation.py, or grad_pipeline.py where the
mesh has stages. Each data shard accumulates gradients over its microbatches, and they are reduced over `data` once.
Clipping and the optimizer run outside, on global arrays: a layer-wise rule on local shards would be silently wrong.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import Blueprint
from spmdtrain.parallel.axes import Rules
from spmdtrain.train import grad_accumulation, grad_pipeline, optimizers
from spmdtrain.train.loss import Batch
from spmdtrain.train.state import TrainState, abstract_state, gradient_specs

Metrics = dict[str, jax.Array]


def make_step(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """`step(state, batch) -> (state, metrics)`, jitted, state donated. Metrics: loss (mean over the unmasked tokens of
    the whole batch), grad_norm (before clipping), learning_rate, tokens (unmasked); side_loss where blocks have one."""
    gradients = _way(rules).make_gradients(config, blueprint, mesh, rules)
    moments = {path: NamedSharding(mesh, spec) for path, spec in gradient_specs(config, blueprint, rules).items()}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, sums = gradients(state.params, state.step, batch)
        grads, norm = optimizers.clipped(grads, config.train.clip)
        directions, opt_state = optimizers.directions(
            config.optimizer, blueprint.parameters, grads, state.opt_state, state.params
        )
        rate = optimizers.learning_rate(config.optimizer, config.train.steps, state.step)

        def moved(path):  # stepped where the moments live, gathered (ZeRO-1) by the output sharding
            x = state.params[path]
            new = x.astype(jnp.float32) - rate * directions[path].astype(jnp.float32)  # rounded once
            return jax.lax.with_sharding_constraint(new.astype(x.dtype), moments[path])

        params = {path: moved(path) for path in state.params}
        tokens = sums.pop("tokens")
        means = {name: total / jnp.maximum(tokens, 1) for name, total in sums.items()}
        metrics = means | {"grad_norm": norm, "learning_rate": rate, "tokens": tokens}
        return TrainState(state.step + 1, params, opt_state), metrics

    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(config, blueprint, mesh, rules))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """`evaluate(params, batch) -> (sum of token losses, number of unmasked tokens)`, without dropout."""
    losses = _way(rules).make_losses(config, blueprint, mesh, rules)

    def evaluate(params, batch):
        sums = losses(params, batch)
        return sums["loss"], sums["tokens"]

    return jax.jit(evaluate)


def _way(rules: Rules):
    return grad_pipeline if rules.sizes["pipeline"] > 1 else grad_accumulation
