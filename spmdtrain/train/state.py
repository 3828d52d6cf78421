"""Defines the training state: what a step changes and a checkpoint keeps.

`abstract_state` is the keystone: shapes, dtypes and shardings of every leaf. Initialisation,
restore, the compiled step and the planner all read it, and therefore agree. `resting_specs` decides
where parameters rest between steps; no other code derives a spec.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel, cast_floating
from spmdtrain.parallel import host
from spmdtrain.parallel.axes import Rules, axes_of_dim, make_rules
from spmdtrain.parallel.padding import (
    Padding,
    Shape,
    add_zeros_apart,
    pad_vocabulary,
    round_up,
)
from spmdtrain.parallel.reduce import scatter_dim, scattered_spec
from spmdtrain.train.items.item import Specs, Start
from spmdtrain.train.items.items import Items, Values, at_rest
from spmdtrain.train.updates import optimizers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The training state between steps, its dicts by dotted parameter path.

    `step`: optimizer steps done. Frozen parameters have no `opt_state`. `items`: the other values
    that the settings ask for, by name: the items of all parts that have an initial value.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optimizers.OptimizerState
    items: Values = field(default_factory=dict)

    @property
    def averaged(self) -> dict[str, jax.Array]:
        """The average of each trained parameter, and the other parameters unchanged.

        If `optimizer.ema` keeps no average, all are unchanged.
        """
        return self.params | self.items.get("ema", {})


Shapes = tuple[dict[str, Any], optimizers.OptimizerState]  # of parameters, of the optimizer state
# Elements from which on a vector beside a weight is split like it: the squares of SOAP, but not the
# rows and columns of Adafactor.
LONG = 2**16


def fresh_shapes(
    model: AbstractModel, update_rules: optimizers.UpdateRules, config: RunConfig
) -> Shapes:
    """Returns the shapes of weights and optimizer state in the model, which do not depend on the
    mesh.

    Those of weights are known: building the model again, only to discard it, would take half
    the time of a setup.
    """
    made = {
        path: jax.ShapeDtypeStruct(model.parameters[path].shape, variable.dtype)
        for path, variable in model.named_variables()
    }
    return jax.eval_shape(lambda made: _resting(model, update_rules, config, made), made)


def abstract_state(  # noqa: PLR0913 - all that a state hangs on
    model: AbstractModel,
    update_rules: optimizers.UpdateRules,
    config: RunConfig,
    mesh: Mesh,
    specs: Specs,
    padding: Padding,
    items: Items,
    shapes: Shapes | None = None,
) -> TrainState:
    """Returns a TrainState of ShapeDtypeStructs, each with its sharding; allocates nothing.

    `specs` and `padding`: the sharding and padding of each parameter at rest, with its optimizer
    state. `shapes`: those of `fresh_shapes`, for callers that have them.
    """

    def leaf(path: str, x: Any, memory: str | None = None) -> Any:
        shape = padding.at_rest[path]
        if x.shape == padding.of_model[path]:
            x = jax.ShapeDtypeStruct(shape, x.dtype)
        else:
            memory = None
        apart = model.parameters[path].apart
        spec = spec_beside(x.shape, shape, apart, specs[path], mesh.shape)
        return at_rest(x, mesh, spec, memory)

    def leaves(path: str, tree: Any) -> Any:
        memory = host.KIND if config.optimizer.memory == "host" else None
        return jax.tree.map(lambda x: leaf(path, x, memory), tree)

    of_params, of_optimizer = shapes or fresh_shapes(model, update_rules, config)
    params = {path: leaf(path, x) for path, x in of_params.items()}
    return TrainState(
        step=at_rest(jax.ShapeDtypeStruct((), jnp.int32), mesh, P()),
        params=params,
        opt_state={path: leaves(path, tree) for path, tree in of_optimizer.items()},
        items=items.abstract(_start(model, config, params, update_rules, specs, mesh, items), mesh),
    )


def place_at_rest(
    config: RunConfig,
    mesh: Mesh,
    model: AbstractModel,
    update_rules: optimizers.UpdateRules,
    zero: int,
    items: Items,
    shapes: Shapes | None = None,
) -> tuple[Specs, Padding, TrainState]:
    """Returns (specs, padding, abstract state) of a model between the steps on this mesh.

    `zero` replaces `train.zero`. `shapes`: those of `fresh_shapes`, for callers that have them,
    e.g. a search over meshes.
    """
    rules = make_rules(config.rules, mesh.shape)
    specs, padding = resting_specs(model, rules, zero)
    state = abstract_state(model, update_rules, config, mesh, specs, padding, items, shapes)
    return specs, padding, state


def parameter_specs(model: AbstractModel, rules: Rules) -> dict[str, P]:
    """Returns the spec that the rules give each parameter."""
    shapes = _shapes_in_use(model, rules)
    return {
        path: rules.parameter_spec(parameter.axes, shapes[path], path)
        for path, parameter in model.parameters.items()
    }


def _shapes_in_use(model: AbstractModel, rules: Rules) -> dict[str, Shape]:
    """Returns the shape of each parameter, with a vocabulary that the mesh divides."""
    return {
        path: pad_vocabulary(parameter.axes, parameter.shape, rules)
        for path, parameter in model.parameters.items()
    }


def resting_specs(model: AbstractModel, rules: Rules, zero: int) -> tuple[dict[str, P], Padding]:
    """Returns the spec of each parameter between steps, and the padding that the splits need.

    The rules give the spec, and with ZeRO-1 a trained parameter is also split over `data`.
    Parameters and moments are split alike, so an update needs no communication. A step starts by
    gathering the parameters over `data` in compute precision (Megatron-LM's distributed optimizer).
    """
    specs = parameter_specs(model, rules)
    of_model = {path: parameter.shape for path, parameter in model.parameters.items()}
    in_use = _shapes_in_use(model, rules)
    at_rest = dict(in_use)
    data = rules.sizes["data"]
    if zero and data > 1:
        for path, shape in in_use.items():
            if not model.parameters[path].is_trained:
                continue  # it has neither gradient nor moments, and would be gathered in each step
            dim = scatter_dim(shape, specs[path], rules.sizes, model.parameters[path].apart)
            if dim is not None:
                specs[path] = scattered_spec(specs[path], dim)
                at_rest[path] = (*shape[:dim], round_up(shape[dim], data), *shape[dim + 1 :])
    return specs, Padding(of_model, in_use, at_rest)


def spec_beside(leaf: Shape, shape: Shape, apart: int, spec: P, sizes: Mapping[str, int]) -> P:
    """Returns the spec of an optimizer leaf of this shape, for a parameter of `shape` at rest.

    It is the parameter's if the leaf has its shape, like a moment. Otherwise its layers and
    experts, `apart` dims, rest like the parameter's, and the rest is whole, unless it is a long
    vector: the axes that split the parameter of a layer then split it as well, if they divide it.
    `sizes`: of all mesh axes.
    """
    if leaf == shape:
        return spec
    stack = shape[:apart]
    if leaf[:apart] != stack:
        return P()
    parts = [*spec, *[None] * (len(shape) - len(spec))]
    over = tuple(axis for part in parts[apart:] for axis in axes_of_dim(part))
    ways = math.prod(sizes[axis] for axis in over)
    is_long = len(leaf) == apart + 1 and leaf[apart] >= LONG
    if ways > 1 and is_long and leaf[apart] % ways == 0:
        return P(*parts[:apart], over)
    return P(*spec[:apart])


def fresh_state(  # noqa: PLR0913 - all that a state hangs on
    model: AbstractModel,
    update_rules: optimizers.UpdateRules,
    config: RunConfig,
    key: jax.Array,
    mesh: Mesh,
    specs: Specs,
    padding: Padding,
    items: Items,
    yes: jax.Array,
) -> TrainState:
    """Returns the state at step 0, for tracing.

    Under jit with output shardings no leaf is ever whole. `yes`: see `add_zeros_apart`.
    """
    params, opt_state = _fresh(model, update_rules, config, key)

    def to_rest(path: str, x: jax.Array) -> jax.Array:
        shape = padding.of_model[path]
        return add_zeros_apart(x, shape, padding.at_rest[path], yes) if x.shape == shape else x

    resting = {path: to_rest(path, x) for path, x in params.items()}
    return TrainState(
        step=jnp.int32(0),
        params=resting,
        opt_state={
            path: jax.tree.map(partial(to_rest, path), tree) for path, tree in opt_state.items()
        },
        items=items.begin(_start(model, config, resting, update_rules, specs, mesh, items)),
    )


def _start(  # noqa: PLR0913 - all that items begin from
    model: AbstractModel,
    config: RunConfig,
    params: dict[str, Any],
    update_rules: optimizers.UpdateRules,
    specs: Specs,
    mesh: Mesh,
    items: Items,
) -> Start:
    learned = optimizers.learned(update_rules)
    subjects = items.subjects(config, model, mesh.shape)
    return Start(config, params, learned, specs, mesh.shape, subjects)


def _fresh(
    model: AbstractModel, update_rules: optimizers.UpdateRules, config: RunConfig, key: jax.Array
) -> tuple[dict[str, jax.Array], optimizers.OptimizerState]:
    """Returns weights and optimizer state in the model's shapes, without padding."""
    return _resting(model, update_rules, config, model.init(key))


def _resting(
    model: AbstractModel,
    update_rules: optimizers.UpdateRules,
    config: RunConfig,
    made: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], optimizers.OptimizerState]:
    """Returns the weights that a model was made with in the dtypes of their rest, and the state
    of their optimizer.
    """
    precision = config.precision

    def resting(path: str, x: jax.Array) -> jax.Array:
        is_frozen = model.parameters[path].is_frozen
        dtype = precision.frozen if is_frozen else precision.params
        return cast_floating(x, model.dtype(path, dtype))

    params = {path: resting(path, x) for path, x in made.items()}
    return params, optimizers.init(update_rules, model.parameters, params)


def resting_bytes(abstract: TrainState, items: Items) -> tuple[int, int]:
    """Returns the bytes per device of the parameters, and of everything else in the state.

    Items that are never saved, because they do not change, count as parameters.
    """
    saved = items.saved(abstract.items)
    frozen = [value for name, value in abstract.items.items() if name not in saved]
    others = (abstract.step, abstract.opt_state, saved)
    return bytes_per_device((abstract.params, frozen)), bytes_per_device(others)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes of abstract arrays on one device; the host's do not count."""
    held = (x for x in jax.tree.leaves(tree) if not host.rests_on_host(x))
    shards = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in held)
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def is_finite(state: TrainState, items: Items) -> bool:
    """Returns True if every number of weights, optimizer state and items is finite.

    Only items that must be finite count. Waits for the devices.
    """
    return bool(_is_finite(state.params, state.opt_state, items.finite(state.items)))


def are_finite(params: dict[str, jax.Array]) -> bool:
    """Returns True if every number of the weights is finite. Waits for the devices."""
    return bool(_is_finite(params))


@jax.jit
def _is_finite(*trees) -> jax.Array:
    floats = [x for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(host.on_device(x)).all() for x in floats]).all()
