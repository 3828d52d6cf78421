"""The training state: what a step changes and a checkpoint keeps.

`abstract_state` is the keystone of the house: shapes, dtypes and shardings of every leaf.
Initialisation, restore, the compiled step and the planner all read it, and therefore agree.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel, cast
from spmdtrain.parallel.padding import Padding, Shape
from spmdtrain.train import ema, loss_scale, spikes
from spmdtrain.train.loss_scale import LossScale
from spmdtrain.train.updates import optimizers

Specs = Mapping[str, P]  # by dotted parameter path


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`step`: optimizer steps done. `params` and `opt_state`: by dotted parameter path.

    Frozen parameters have no `opt_state`. `recent`: loss and gradient norm of the last good steps,
    float32 [window, 2], where steps are judged by them (spikes.py). `ema`: the exponential moving
    average of the parameters that are trained, float32, which rests as they do; empty without
    `optimizer.ema`. `loss_scale`: of float16 (loss_scale.py).
    """

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optimizers.OptimizerState
    recent: jax.Array | None = None
    ema: dict[str, jax.Array] = field(default_factory=dict)
    loss_scale: LossScale | None = None

    @property
    def averaged(self) -> dict[str, jax.Array]:
        """The average of each parameter, and those that are not trained as they are."""
        return self.params | self.ema


def abstract_state(  # noqa: PLR0913 - all that a state hangs on
    model: AbstractModel,
    rules: optimizers.Rules,
    config: RunConfig,
    mesh: Mesh,
    specs: Specs,
    padding: Padding,
) -> TrainState:
    """A TrainState of ShapeDtypeStructs, each with its sharding; allocates nothing.

    `specs` and `padding`: where and in which shape each parameter rests, and its optimizer state
    with it.
    """

    def moments_of(path: str, state):
        shape = padding.at_rest[path]
        stacked = model.parameters[path].stacked
        return jax.tree.map(
            lambda x: _leaf(x, mesh, spec_beside(x.shape, shape, stacked, specs[path])), state
        )

    shapes = jax.eval_shape(
        lambda key: fresh_state(model, rules, config, key, padding), jax.random.key(0)
    )
    return TrainState(
        step=_leaf(shapes.step, mesh, P()),
        params={path: _leaf(x, mesh, specs[path]) for path, x in shapes.params.items()},
        opt_state={path: moments_of(path, state) for path, state in shapes.opt_state.items()},
        recent=None if shapes.recent is None else _leaf(shapes.recent, mesh, P()),
        ema={path: _leaf(x, mesh, specs[path]) for path, x in shapes.ema.items()},
        loss_scale=jax.tree.map(lambda x: _leaf(x, mesh, P()), shapes.loss_scale),
    )


def _leaf(x: Any, mesh: Mesh, spec: P) -> Any:
    """A ShapeDtypeStruct with its sharding, which stands for an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def spec_beside(leaf: Shape, shape: Shape, stacked: int, spec: P) -> P:
    """The spec of an optimizer leaf of this shape, beside a parameter of `shape` at rest.

    It is the parameter's if the leaf has its shape, as a moment has. Else its layers lie as the
    parameter's do, and the rest is whole.
    """
    if leaf == shape:
        return spec
    stack = shape[:stacked]
    if leaf[: len(stack)] == stack:
        return P(*spec[: len(stack)])
    return P()


def fresh_state(
    model: AbstractModel,
    rules: optimizers.Rules,
    config: RunConfig,
    key: jax.Array,
    padding: Padding,
) -> TrainState:
    """The state at step 0, for tracing: under jit with output shardings no leaf is ever whole."""
    params = cast(model.init(key), config.precision.params)
    opt_state = optimizers.init(rules, model.parameters, params)
    recent = spikes.no_figures(config.guard)
    at_rest = {path: padding.to_rest(path, x) for path, x in params.items()}
    return TrainState(
        step=jnp.int32(0),
        params=at_rest,
        opt_state={path: padding.tree_to_rest(path, x) for path, x in opt_state.items()},
        recent=None if recent is None else jnp.array(recent),
        ema=ema.begin(at_rest, rules) if config.optimizer.ema else {},
        loss_scale=loss_scale.begin(config.precision),
    )


def bytes_per_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    shards = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def is_finite(state: TrainState) -> bool:
    """True if every number of the weights and the optimizer state is finite.

    Waits for the devices.
    """
    return bool(_is_finite(state.params, state.opt_state, state.ema))


@jax.jit
def _is_finite(*trees) -> jax.Array:
    floats = [x for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
