"""Optimizers that see one layer's tensor: each parameter has a transformation and a state of its own, vmapped over
the dims that stack layers. A layer-wise rule (a trust ratio, an orthogonalisation, a factored moment) is then right on
stacked layers, and so is a decay mask that asks for the number of dims.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.config.schema import AdamW, Schedule, Sgd
from spmdtrain.models.abstract import Parameter

OptimizerState = dict[str, Any]


def decays(path: str, parameter: Parameter) -> bool:
    """Weight decay acts on matrices: two dims and more without the stack, and not a bias."""
    return len(parameter.shape) - parameter.stacked >= 2 and "bias" not in path.rsplit(".", 1)[-1]


def transformation(config: AdamW | Sgd, decay: bool) -> optax.GradientTransformation:
    """Gradient -> update, not yet scaled by the learning rate; it is subtracted.

    Its state has the same leaves, by the same names, whatever the values of the settings: a run goes on with another
    decay or momentum.
    """
    weight_decay = config.weight_decay if decay else 0.0
    if isinstance(config, AdamW):  # decoupled decay, arXiv:1711.05101
        adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
        return optax.chain(adam, optax.add_decayed_weights(weight_decay)) if weight_decay else optax.chain(adam)
    return _after_decay(optax.chain(optax.trace(config.momentum)), weight_decay)


def _after_decay(rule: optax.GradientTransformation, weight_decay: float) -> optax.GradientTransformation:
    """`rule` on gradients with the decay in them. Its state is the rule's alone, as a chain's would not be."""
    if not weight_decay:
        return rule

    def update(gradients, state, params):
        decayed = jax.tree.map(lambda g, x: g + weight_decay * x, gradients, params)
        return rule.update(decayed, state, params)

    return optax.GradientTransformation(rule.init, update)


def learning_rate(config: Schedule, steps: int, step: jax.Array) -> jax.Array:
    """Rate of 0-based `step`: while warming up (step + 1) / (warmup + 1) of the peak; at the last step the final."""
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup
    if config.schedule == "constant":
        falling = peak
    else:
        share = jnp.clip((step - warmup) / max(steps - 1 - warmup, 1), 0, 1)
        height = 0.5 * (1 + jnp.cos(jnp.pi * share)) if config.schedule == "cosine" else 1 - share
        falling = final + (peak - final) * height
    return jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), falling).astype(jnp.float32)


def init(config: AdamW | Sgd, parameters: Mapping[str, Parameter], values: Mapping[str, jax.Array]) -> OptimizerState:
    def one(path, parameter):
        return _over_stack(transformation(config, decays(path, parameter)).init, parameter.stacked)(values[path])

    return {path: one(path, parameter) for path, parameter in parameters.items()}


def updates(
    config: AdamW | Sgd,
    parameters: Mapping[str, Parameter],
    gradients: Mapping[str, jax.Array],
    state: OptimizerState,
    values: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], OptimizerState]:
    """(updates, new state) by parameter; an update is still to be scaled by the learning rate, and subtracted.

    Gradients may be more precise than the state (`precision.params` below `precision.accumulate`): the rule computes
    in the wider dtype of the two, and every leaf of the state keeps the dtype that `init` gave it.
    """
    found, kept = {}, {}
    for path, parameter in parameters.items():
        update = _over_stack(transformation(config, decays(path, parameter)).update, parameter.stacked)
        found[path], new = update(gradients[path], state[path], values[path])
        kept[path] = jax.tree.map(lambda new, old: new.astype(old.dtype), new, state[path])
    return found, kept


def clip(gradients: dict[str, jax.Array], limit: float | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gradients scaled so that their global norm is at most `limit`, and the norm before; its squares add up in
    float32 whatever the dtype of the gradients."""
    norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients))
    if limit is None:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return {path: (leaf * scale).astype(leaf.dtype) for path, leaf in gradients.items()}, norm


def _over_stack(function, stacked: int):
    for _ in range(stacked):
        function = jax.vmap(function)
    return function
