"""Optimizers, learning rates and clipping.

Each parameter has a *rule* of its own: an optax transformation and a multiple of the learning rate.
The rule sees one layer's tensor, because it is vmapped over the dims that stack layers. A
layer-wise rule (a trust ratio, an orthogonalisation, a factored moment) is therefore right on stacked layers,
and so is a decay mask that asks for the number of dims. A parameter without a rule is frozen: it
has no moments, and its gradient counts nowhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import AdamW, Lion, OptimizerConfig, RunConfig, Sgd
from spmdtrain.models.abstract import Parameter

OptimizerState = dict[str, Any]  # by dotted parameter path; frozen parameters have none
Schedule = Callable[[jax.Array], Any]  # 0-based step -> learning rate


@dataclass(frozen=True)
class Rule:
    """How one parameter is trained: x - learning rate x `rate` x update.

    `transformation` makes the update from the gradient of one layer, as `optax.scale_by_adam()`
    does. It must not scale by the learning rate itself.
    """

    transformation: optax.GradientTransformation
    rate: float = 1.0


Rules = Mapping[str, Rule]  # by dotted parameter path
# What a caller may give: one transformation for all parameters, or a function of a parameter's
# dotted path and its shape and logical axes. None freezes the parameter.
ChooseRule = Callable[[str, Parameter], Rule | optax.GradientTransformation | None]
Optimizer = ChooseRule | optax.GradientTransformation


# The shipped optimizers


def make_optimizer(config: OptimizerConfig) -> Callable[[str, Parameter], Rule]:
    """The optimizer that these settings ask for, as a function of path and parameter."""

    def choose(path: str, parameter: Parameter) -> Rule:
        return Rule(transformation(config, decays(path, parameter)))

    return choose


def decays(path: str, parameter: Parameter) -> bool:
    """Whether weight decay acts on it: two dims and more without the stack, and not a bias."""
    is_bias = "bias" in path.rsplit(".", 1)[-1]
    return len(parameter.shape) - parameter.stacked >= 2 and not is_bias


def transformation(config: OptimizerConfig, decay: bool) -> optax.GradientTransformation:
    """Gradient -> update, not yet scaled by the learning rate; the update is subtracted.

    The leaves of its state have the same names whatever the values of the settings, so that a run
    goes on with another decay or momentum.
    """
    return BUILDERS[type(config)](config, config.weight_decay if decay else 0.0)


def _adamw(config: AdamW, weight_decay: float) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""
    return _decoupled(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon), weight_decay)


def _lion(config: Lion, weight_decay: float) -> optax.GradientTransformation:
    """The sign of an interpolated momentum, with decoupled weight decay (arXiv:2302.06675)."""
    return _decoupled(optax.scale_by_lion(config.beta1, config.beta2), weight_decay)


def _sgd(config: Sgd, weight_decay: float) -> optax.GradientTransformation:
    """Momentum of gradients with the weight decay in them."""
    rule = optax.chain(optax.trace(config.momentum))
    if not weight_decay:
        return rule

    def update(gradients, state, params):  # a chain's state would differ from that of `rule`
        decayed = jax.tree.map(lambda g, x: g + weight_decay * x, gradients, params)
        return rule.update(decayed, state, params)

    return optax.GradientTransformation(rule.init, update)


def _decoupled(rule: optax.GradientTransformation, weight_decay: float) -> optax.GradientTransformation:
    if not weight_decay:
        return optax.chain(rule)
    return optax.chain(rule, optax.add_decayed_weights(weight_decay))


BUILDERS: Mapping[type[OptimizerConfig], Callable[..., optax.GradientTransformation]] = {
    AdamW: _adamw,
    Lion: _lion,
    Sgd: _sgd,
}


# Rules of all parameters


def choose_rules(config: RunConfig, optimizer: Optimizer | None, parameters: Mapping[str, Parameter]) -> Rules:
    """The rule of each parameter that is not frozen, by `optimizer` or by the settings.

    ConfigError where `optimizer` is none.
    """
    if optimizer is None:
        choose = make_optimizer(config.optimizer)
        return {path: choose(path, each) for path, each in parameters.items()}
    choose = optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        choose = lambda *_: optimizer  # noqa: E731
    if not callable(choose):
        raise ConfigError(f"optimizer={optimizer!r:.80} is no optimizer", fix=_TAKES)
    chosen = {path: _rule(path, choose(path, each)) for path, each in parameters.items()}
    rules = {path: rule for path, rule in chosen.items() if rule is not None}
    if not rules:
        raise ConfigError(f"optimizer= freezes all {len(parameters)} parameters", fix=_TAKES)
    for path, rule in rules.items():
        _check_direction(path, parameters[path], rule)
    return rules


_TAKES = "an optax transformation, or a function (path, parameter) -> transformation, Rule or None"


def _rule(path: str, found: Any) -> Rule | None:
    if isinstance(found, optax.GradientTransformation):
        found = Rule(found)
    if found is None or isinstance(found, Rule):
        return found
    raise ConfigError(f"optimizer= gives {found!r:.80} for {path}", fix=_TAKES)


def _check_direction(path: str, parameter: Parameter, rule: Rule) -> None:
    """Refuses a transformation whose update points against the gradient: it is subtracted, so that
    the loss would rise. That is what optax gives with the learning rate in it."""
    small = (2,) * (len(parameter.shape) - parameter.stacked)
    values = jnp.ones(small)
    gradient = jnp.ones(small)
    state = rule.transformation.init(values)
    update, _ = rule.transformation.update(gradient, state, values)
    if float(jnp.sum(update * gradient)) < 0:
        raise ConfigError(
            f"optimizer= holds a learning rate: its update of {path} points against the gradient",
            found="an optax optimizer such as optax.lion(1e-3)",
            fix="its part before the rate, optax.scale_by_lion(); the rate is optimizer.learning_rate",
        )


def init(rules: Rules, parameters: Mapping[str, Parameter], values: Mapping[str, jax.Array]) -> OptimizerState:
    """The optimizer state before the first step."""
    return {
        path: _over_stack(rule.transformation.init, parameters[path].stacked)(values[path])
        for path, rule in rules.items()
    }


def updates(
    rules: Rules,
    parameters: Mapping[str, Parameter],
    gradients: Mapping[str, jax.Array],
    state: OptimizerState,
    values: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], OptimizerState]:
    """(updates, new state) by parameter. An update is still to be scaled by its rate, and subtracted.

    Gradients may be more precise than the state (`precision.params` below `precision.accumulate`):
    the rule computes in the wider dtype of the two, and every leaf of the state keeps the dtype
    that `init` gave it.
    """
    found = {}
    kept = {}
    for path, rule in rules.items():
        update = _over_stack(rule.transformation.update, parameters[path].stacked)
        found[path], new = update(gradients[path], state[path], values[path])
        kept[path] = jax.tree.map(lambda new, old: new.astype(old.dtype), new, state[path])
    return found, kept


def _over_stack(function: Callable, stacked: int) -> Callable:
    for _ in range(stacked):
        function = jax.vmap(function)
    return function


# Learning rates


def make_schedule(config: RunConfig, schedule: Schedule | None) -> Schedule:
    """Learning rate of a 0-based step, a float32 scalar: `schedule`, or what the settings say."""
    if schedule is None:
        return partial(learning_rate, config.optimizer, config.train.steps)
    takes = "a function of the step in jax.numpy, such as optax.warmup_constant_schedule(0, 1e-3, 100)"
    if not callable(schedule):
        raise ConfigError(f"schedule={schedule!r:.80} is no schedule", fix=takes)

    def rate(step: jax.Array) -> jax.Array:
        return jnp.asarray(schedule(step), jnp.float32)

    try:
        shape = jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32)).shape
    except jax.errors.ConcretizationTypeError:
        what = "schedule= asks for the value of the step while the step is compiled"
        raise ConfigError(what, fix=f"jnp.where instead of if: {takes}") from None
    if shape:
        raise ConfigError(f"schedule= gives an array of shape {shape}, not one rate", fix=takes)
    return rate


def learning_rate(config: OptimizerConfig, steps: int, step: jax.Array) -> jax.Array:
    """Learning rate of the 0-based `step` of `steps`, a float32 scalar.

    While warming up it is (step + 1) / (warmup + 1) of the peak; at the last step it is the final
    one.
    """
    peak = config.learning_rate
    final = config.final_learning_rate
    warmup = config.warmup
    if config.schedule == "constant":
        falling = peak
    else:
        share = jnp.clip((step - warmup) / max(steps - 1 - warmup, 1), 0, 1)
        falling = final + (peak - final) * _height(config.schedule, share)
    return jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), falling).astype(jnp.float32)


def _height(schedule: str, share: jax.Array) -> jax.Array:
    """How far above the final rate, from 1 to 0, when `share` of the way has gone."""
    if schedule == "cosine":
        return 0.5 * (1 + jnp.cos(jnp.pi * share))
    return 1 - share


# Clipping


def clip(gradients: dict[str, jax.Array], limit: float | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gradients scaled so that their global norm is at most `limit`, and the norm before.

    The squares add up in float32 whatever the dtype of the gradients.
    """
    norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients))
    if limit is None:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return {path: (leaf * scale).astype(leaf.dtype) for path, leaf in gradients.items()}, norm
