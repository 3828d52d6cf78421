"""The training state: what a step changes and a checkpoint keeps.

`abstract_state` is the keystone of the house: shapes, dtypes and shardings of every leaf. Initialisation, restore, the
compiled step and the planner all read it, and therefore agree.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import Blueprint, Parameter, cast
from spmdtrain.models.context import random_key
from spmdtrain.parallel.axes import Rules, manual_axes
from spmdtrain.parallel.reduce import Crossing, crossing, scatter_dim, scattered_spec
from spmdtrain.train import optimizers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`step`: optimizer steps done. `params` and `opt_state`: by dotted parameter path."""

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optimizers.OptimizerState


def parameter_specs(blueprint: Blueprint, rules: Rules) -> dict[str, P]:
    """Where each parameter rests."""
    return {path: rules.parameter_spec(p.axes, p.shape, path) for path, p in blueprint.parameters.items()}


def scatter_dims(config: RunConfig, blueprint: Blueprint, rules: Rules) -> dict[str, int | None]:
    """The dim of each parameter's gradient and optimizer state that ZeRO-1 splits over `data`; None: whole."""
    data = rules.sizes["data"]
    if not config.train.zero or data == 1:
        return dict.fromkeys(blueprint.parameters)
    specs = parameter_specs(blueprint, rules)
    return {path: scatter_dim(p.shape, specs[path], data) for path, p in blueprint.parameters.items()}


def gradient_specs(config: RunConfig, blueprint: Blueprint, rules: Rules) -> dict[str, P]:
    """Where a reduced gradient, its moments and its update live: as the parameter, and over `data` with ZeRO-1."""
    dims, specs = scatter_dims(config, blueprint, rules), parameter_specs(blueprint, rules)
    return {path: scattered_spec(specs[path], dims[path]) for path in specs}


def crossings(config: RunConfig, blueprint: Blueprint, rules: Rules) -> dict[str, Crossing]:
    """How each gradient leaves the manual region of the step."""
    axes = [axis for axis in manual_axes(rules.sizes) if rules.sizes[axis] > 1]
    return {path: crossing(spec, axes) for path, spec in gradient_specs(config, blueprint, rules).items()}


def abstract_state(config: RunConfig, blueprint: Blueprint, mesh: Mesh, rules: Rules) -> TrainState:
    """A TrainState of ShapeDtypeStructs, each with its sharding; allocates nothing."""

    def leaf(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    shapes = jax.eval_shape(lambda key: _fresh(config, blueprint, key), jax.random.key(0))
    rest, moments = parameter_specs(blueprint, rules), gradient_specs(config, blueprint, rules)
    return TrainState(
        step=leaf(shapes.step, P()),
        params={path: leaf(x, rest[path]) for path, x in shapes.params.items()},
        opt_state={
            path: jax.tree.map(
                lambda x, path=path: leaf(x, _spec_beside(x, blueprint.parameters[path], moments[path])), state
            )
            for path, state in shapes.opt_state.items()
        },
    )


def _spec_beside(x: jax.ShapeDtypeStruct, parameter: Parameter, spec: P) -> P:
    """Of an optimizer leaf: as the gradient if it has its shape; else its layers as the gradient's, the rest whole."""
    if x.shape == parameter.shape:
        return spec
    stack = parameter.shape[: parameter.stacked]
    return P(*spec[: len(stack)]) if x.shape[: len(stack)] == stack else P()


def bytes_per_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def init_state(config: RunConfig, blueprint: Blueprint, abstract: TrainState) -> TrainState:
    """The state at step 0. Every leaf is born in its shards; values depend on the seed alone, not on the mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    fresh = jax.jit(lambda key: _fresh(config, blueprint, key), out_shardings=shardings)
    return fresh(random_key(config.train.seed, "init"))


def _fresh(config: RunConfig, blueprint: Blueprint, key: jax.Array) -> TrainState:
    params = cast(blueprint.init(key), config.precision.params)
    return TrainState(jnp.int32(0), params, optimizers.init(config.optimizer, blueprint.parameters, params))


def is_finite(state: TrainState) -> bool:
    """Whether no weight and nothing of the optimizer is infinite or not a number. Waits for the devices."""
    return bool(_is_finite(state.params, state.opt_state))


@jax.jit
def _is_finite(*trees) -> jax.Array:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack(finite).all()
