"""Reports the load of experts, and evens it out with a rule for their biases.

The gradient of a `LoadBias` is the number of tokens that each expert of a layer had in the step's
batch, over the number of all tokens (models/layers/router.py). It is the same on every mesh and
with any accumulation.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.config.schema import ExpertsConfig, TransformerConfig
from spmdtrain.models.abstract import AbstractModel, Parameter
from spmdtrain.models.layers.router import ENTROPY, LOAD
from spmdtrain.train.part import Part
from spmdtrain.train.updates.optimizers import Rule, UpdateRules

LAYER, EVENNESS = "expert_load_layer", "expert_evenness"
# Loads that differ by less, relative to their mean, count as equal: the difference is rounding.
EQUAL = 4 * float(jnp.finfo(jnp.float32).eps)


def update_rules(experts: ExpertsConfig | None, parameters: Mapping[str, Parameter]) -> UpdateRules:
    """Returns the rules of the load biases among `parameters`, by path.

    A bias moves by `model.experts.bias_rate` a step, against the deviation of its expert's load
    from the mean; the rate is 0 if routers have no bias.
    """
    rate = 0.0 if experts is None else experts.bias_rate or 0.0
    rule = Rule(_towards_the_mean(), own_rate=rate)
    return {path: rule for path, parameter in parameters.items() if parameter.is_load_bias}


def _towards_the_mean() -> optax.GradientTransformation:
    """Returns the transformation that gives the sign of each load's deviation from its layer's mean
    (arXiv:2408.15664).
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        return jax.tree.map(deviation_sign, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def deviation_sign(load_x: jax.Array) -> jax.Array:
    """Returns 1 for the experts with more than the mean load, -1 with less, 0 with the mean."""
    mean = load_x.mean()
    deviation_x = load_x - mean
    return jnp.where(jnp.abs(deviation_x) <= EQUAL * mean, 0, jnp.sign(deviation_x))


def figures(
    config: TransformerConfig, model: AbstractModel, gradients: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the loads of a step as float32 scalars; none if the model has no experts.

    expert_load is the load of the most loaded expert over the mean of its layer, and
    expert_load_layer the number of that layer, from 0; the blocks of model.multi_token follow the
    others. expert_evenness is the entropy of a layer's loads over that of even loads, in the layer
    where it is lowest: 1 if all experts have equally many tokens. A batch without tokens has loads
    of 0.
    """
    loads = [
        model.stage_layout.unstaged(gradient) if model.in_stack(path) else gradient
        for path, gradient in gradients.items()
        if model.parameters[path].is_load_bias
    ]
    if not loads:
        return {}
    load_lx = jnp.concatenate(loads).astype(jnp.float32)
    layers, count = load_lx.shape
    share_lx = load_lx / jnp.maximum(load_lx.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    most_l = share_lx.max(-1) * count
    entropy_l = -jax.scipy.special.xlogy(share_lx, share_lx).sum(-1)
    numbers = [number for number, mlp in enumerate(config.layer_mlps) if mlp == "experts"]
    if config.further_depth and config.further_parts.mlp == "experts":
        numbers += [config.layers + depth for depth in range(config.further_depth)]
    if len(numbers) != layers:  # a custom model: the place among its layers with experts
        numbers = range(layers)
    return {
        LOAD: most_l.max(),
        LAYER: jnp.array(numbers, jnp.float32)[most_l.argmax()],
        EVENNESS: entropy_l.min() / math.log(count) if count > 1 else jnp.float32(1),
    }


ROUTERS = Part("routers", shown=(ENTROPY,))
