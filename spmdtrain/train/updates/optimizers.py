"""Updates each parameter by its rule, and clips gradients.

Each parameter has its own *rule*: an optax transformation and a multiple of the learning rate. The
rule sees one layer's tensor, or one expert's, because it is vmapped over the dims that stack them.
A layer-wise rule (a trust ratio, an orthogonalisation, a factored moment) is therefore right on
stacked layers, and so is a decay mask that looks at the number of dims. A parameter without a rule
is frozen: it has no moments, and its gradient is not used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.compiled.step_parts import part
from spmdtrain.config.arguments import as_number, shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import Parameter, over_stack
from spmdtrain.models.context import random_key
from spmdtrain.parallel.padding import Padding
from spmdtrain.pipeline.stage_layout import StageLayout
from spmdtrain.train.updates.stochastic_rounding import key_of, stochastic_bfloat16
from spmdtrain.train.updates.unfit import refuse_unfit
from spmdtrain.train.updates.whole_tree import WholeTree, needs_whole_tree

OptimizerState = dict[str, Any]  # by dotted parameter path; frozen parameters have none


GradientPoint = Callable[[Any, jax.Array], jax.Array]


@dataclass(frozen=True)
class Rule:
    """The update of one parameter: x - learning rate x `rate` x update.

    `transformation` makes the update from the gradient of one layer, like `optax.scale_by_adam()`.
    It must not scale by the learning rate itself.

    `gradient_point(state, x)` is the point at which the gradient is taken, element by element;
    None: x. A rule that has one gets learning rate x `rate` as `learning_rate=`, and its update
    includes it (schedule_free.py).

    `own_rate` replaces the learning rate for a parameter that does not follow the loss: the
    gradient norm, clipping and the average of the weights leave it out.

    `together` is set by `choose_update_rules` if one transformation must see several parameters.
    """

    transformation: optax.GradientTransformation
    rate: float = 1.0
    gradient_point: GradientPoint | None = None
    together: WholeTree | None = None
    own_rate: float | None = None

    def __post_init__(self):
        if not isinstance(self.transformation, optax.GradientTransformation):
            value = shown(self.transformation)
            raise ConfigError(f"Rule({value}) has no optax transformation", fix=_TAKES)
        object.__setattr__(self, "rate", as_number(self.rate, "rate", 0))
        if self.own_rate is not None:
            object.__setattr__(self, "own_rate", as_number(self.own_rate, "own_rate", 0))
        if self.gradient_point is not None and not callable(self.gradient_point):
            value = shown(self.gradient_point)
            raise ConfigError(f"gradient_point={value} is not a function", fix="None")


UpdateRules = Mapping[str, Rule]  # by dotted parameter path
# What a caller may give: one transformation for all parameters, or a function of a parameter's
# dotted path and its shape and logical axes. None freezes the parameter.
ChooseRule = Callable[[str, Parameter], Rule | optax.GradientTransformation | None]
Optimizer = ChooseRule | optax.GradientTransformation


# The rules of all parameters


def learned(update_rules: UpdateRules) -> list[str]:
    """Returns the paths of the parameters that follow the slope of the loss."""
    return [path for path, rule in update_rules.items() if rule.own_rate is None]


def choose_update_rules(
    optimizer: Optimizer, parameters: Mapping[str, Parameter], layout: StageLayout
) -> UpdateRules:
    """Returns the rule of each parameter that is not frozen.

    `layout`: that of the layers, if the parameters are stacked. Raises ConfigError if `optimizer`
    is not one.
    """
    choose = optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        choose = lambda *_: optimizer  # noqa: E731
    if not callable(choose):
        raise ConfigError(f"optimizer={optimizer!r:.80} is not an optimizer", fix=_TAKES)
    chosen = {path: _rule(path, choose(path, parameter)) for path, parameter in parameters.items()}
    update_rules = {path: rule for path, rule in chosen.items() if rule is not None}
    if not update_rules:
        raise ConfigError(f"optimizer= freezes all {len(parameters)} parameters", fix=_TAKES)
    for path, rule in update_rules.items():
        if rule.gradient_point is not None:
            _check_direction(path, parameters[path], rule)
    return _with_whole_trees(update_rules, parameters, layout)


_TAKES = "an optax transformation, or a function (path, parameter) -> transformation, Rule or None"


def _rule(path: str, choice: Any) -> Rule | None:
    if isinstance(choice, optax.GradientTransformation):
        choice = Rule(choice)
    if choice is None or isinstance(choice, Rule):
        return choice
    raise ConfigError(f"optimizer= gives {choice!r:.80} for {path}", fix=_TAKES)


def _with_whole_trees(
    update_rules: UpdateRules, parameters: Mapping[str, Parameter], layout: StageLayout
) -> UpdateRules:
    """Returns the rules, joining parameters whose transformation looks at more than one tensor.

    Raises ConfigError if such a transformation has only one of them, or cannot see them all.
    """
    sharing: dict[int, dict[str, Parameter]] = {}
    for path, rule in update_rules.items():
        if rule.gradient_point is None:
            sharing.setdefault(id(rule.transformation), {})[path] = parameters[path]
    rules = dict(update_rules)
    for group in sharing.values():
        transformation = update_rules[next(iter(group))].transformation
        refuse_unfit(transformation, group)
        whole = needs_whole_tree(transformation, group)
        if whole is None:
            by_dims = {
                len(parameter.shape) - parameter.apart: path for path, parameter in group.items()
            }
            for path in by_dims.values():
                _check_direction(path, parameters[path], update_rules[path])
            continue
        if len(group) == 1 and len(update_rules) > 1:
            raise ConfigError(
                f"optimizer= gives {next(iter(group))} a separate transformation that looks at "
                "other tensors, or draws random numbers",
                fix="the same one for all parameters, made outside the function; to clip: "
                "--set train.clip=1.0",
            )
        if layout.padding or (whole.by_layer and len(layout.shape) > 1):
            raise ConfigError(
                "optimizer= looks at all layers at once, or draws random numbers, and a pipeline "
                "has the layers on several devices",
                fix="train.clip, which clips to the global norm on any mesh, or mesh.pipeline=1",
            )
        _check_sign(next(iter(group)), *whole.trial_update(group))
        for path in group:
            rules[path] = replace(update_rules[path], together=whole)
    return rules


def _check_direction(path: str, parameter: Parameter, rule: Rule) -> None:
    """Refuses a transformation whose update points against the gradient, see `_check_sign`."""
    small = (2,) * (len(parameter.shape) - parameter.apart)
    values = jnp.ones(small)
    gradient = jnp.ones(small)
    state = rule.transformation.init(values)
    update, _ = _update_of(rule, jnp.float32(1))(gradient, state, values)
    _check_sign(path, update, gradient)


def _check_sign(path: str, update: Any, gradient: jax.Array) -> None:
    """Refuses an update that points against the gradient.

    It is subtracted, so the loss would rise. optax gives such updates if they include the learning
    rate.
    """
    if float(jnp.vdot(jnp.asarray(update), gradient)) < 0:
        raise ConfigError(
            f"optimizer= holds a learning rate: its update of {path} points against the gradient",
            found="an optax optimizer such as optax.lion(1e-3)",
            fix="its part before the rate, optax.scale_by_lion(), with optimizer.learning_rate; or "
            "optax.chain(it, optax.scale(-1)) with optimizer.learning_rate=1, "
            "optimizer.schedule=constant and optimizer.warmup=0",
        )


def init(
    update_rules: UpdateRules, parameters: Mapping[str, Parameter], values: Mapping[str, jax.Array]
) -> OptimizerState:
    """Returns the optimizer state before the first step."""
    state = {}
    for path, rule in update_rules.items():
        if rule.together is None:
            begin = over_stack(rule.transformation.init, parameters[path].apart)
            state[path] = begin(values[path])
    for whole in _whole_trees(update_rules):
        state |= whole.init(values)
    return {path: state[path] for path in update_rules}


@part("optimizer")
def updates(
    update_rules: UpdateRules,
    parameters: Mapping[str, Parameter],
    gradients: Mapping[str, jax.Array],
    state: OptimizerState,
    values: Mapping[str, jax.Array],
    rate: jax.Array | float = 1.0,
) -> tuple[dict[str, jax.Array], OptimizerState]:
    """Returns (updates, new state) by parameter.

    An update must still be scaled by its rate, as in `scaled`, and subtracted. `rate` is the
    learning rate, for rules that include it.

    A rule computes in float32, whatever `precision.params` and `precision.accumulate` are, and
    every leaf of the state keeps the dtype that `init` gave it.
    """
    by_path = {}
    after = {}
    wide = in_float32((dict(gradients), state, dict(values)))
    for path, rule in update_rules.items():
        if rule.together is None:
            update = over_stack(_update_of(rule, rate), parameters[path].apart)
            by_path[path], after[path] = update(*(tree[path] for tree in wide))
    for whole in _whole_trees(update_rules):
        updated, new = whole.update(*wide)
        by_path |= updated
        after |= new
    new_state = {
        path: jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), after[path], state[path])
        for path in update_rules
    }
    return {path: by_path[path] for path in update_rules}, new_state


def in_float32(tree: Any) -> Any:
    """Returns a tree with its narrow floating leaves in float32; others are returned unchanged.

    In bfloat16 a decay of 0.99 would be 0.988, and one of 0.999 would be 1.
    """

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(wide, tree)


def _whole_trees(update_rules: UpdateRules) -> list[WholeTree]:
    """Returns each `WholeTree` once."""
    together = {id(rule.together): rule.together for rule in update_rules.values()}
    return [whole for whole in together.values() if whole is not None]


def _update_of(rule: Rule, rate: jax.Array | float) -> Callable:
    """Returns `update(gradient, state, value)` of one layer, for a learning rate."""
    if rule.gradient_point is None:
        return rule.transformation.update
    holds_rate = optax.with_extra_args_support(rule.transformation)
    return partial(holds_rate.update, learning_rate=rule.rate * rate)


def scaled(rule: Rule, update: jax.Array, rate: jax.Array) -> jax.Array:
    """Returns the update as it is subtracted from the parameter, in float32."""
    update = update.astype(jnp.float32)
    if rule.gradient_point is not None:
        return update
    if rule.own_rate is not None:
        return rule.own_rate * update
    own_rate = rate if rule.rate == 1 else rule.rate * rate
    return own_rate * update


@part("optimizer")
def rounding_key(config: RunConfig, step: jax.Array) -> jax.Array | None:
    """Returns the key from which weights are rounded after a step; None: to nearest."""
    if config.precision.rounding == "nearest":
        return None
    return jax.random.fold_in(random_key(config.train.seed, "rounding"), step)


def apply(  # noqa: PLR0913 - all that an update consists of
    update_rules: UpdateRules,
    params: Mapping[str, jax.Array],
    updates: Mapping[str, jax.Array],
    rate: jax.Array,
    key: jax.Array | None = None,
    padding: Padding | None = None,
) -> dict[str, jax.Array]:
    """Returns the parameters after one step; frozen ones do not change.

    Parameters and updates are sharded alike, so each device updates its own. `key`: the stochastic
    rounding of bfloat16 weights draws from it, for the elements of the model: on a mesh whose
    `padding` makes a weight larger, its elements have the draws that they have without.
    """

    def stepped(path: str, x: jax.Array) -> jax.Array:
        if path not in update_rules:
            return x
        after = x.astype(jnp.float32) - scaled(update_rules[path], updates[path], rate)
        if key is not None and x.dtype == jnp.bfloat16:
            of_model = padding.from_rest(path, after) if padding else after
            rounded = stochastic_bfloat16(of_model, key_of(path, key))
            return padding.to_rest(path, rounded) if padding else rounded
        return after.astype(x.dtype)

    return {path: stepped(path, x) for path, x in params.items()}


def gradient_points(
    update_rules: UpdateRules, values: Mapping[str, jax.Array], state: OptimizerState
) -> dict[str, jax.Array]:
    """Returns the point at which each gradient is taken, in its parameter's dtype and sharding."""
    points = dict(values)
    for path, rule in update_rules.items():
        if rule.gradient_point is not None:
            x = values[path]
            points[path] = rule.gradient_point(state[path], x).astype(x.dtype)
    return points


# Clipping


@part("optimizer")
def clip(
    gradients: dict[str, jax.Array], limit: float | None, update_rules: UpdateRules | None = None
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns gradients scaled so that their global norm is at most `limit`, and the norm before.

    Squares are summed in float32 whatever the dtype of the gradients. With `update_rules`, only
    those of `learned` parameters count and are scaled.
    """
    counted = set(gradients if update_rules is None else learned(update_rules))
    slopes = {path: leaf for path, leaf in gradients.items() if path in counted}
    norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), slopes))
    if limit is None:
        return gradients, norm
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    scaled = {path: (leaf * scale).astype(leaf.dtype) for path, leaf in slopes.items()}
    return gradients | scaled, norm
