"""Brings a config to devices: mesh, rules, abstract model and abstract state, made once.

`shard` derives each of them and what follows from them (specs, reductions, the batch's shape, the
pipeline's schedule) and returns them as one frozen value, a `Setup`. Steps, gradients, restore, the
run and the planner take it; no other code derives a spec.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, check_config
from spmdtrain.models.abstract import AbstractModel, build_model
from spmdtrain.models.choose import MakeModel, choose_model
from spmdtrain.models.context import random_key
from spmdtrain.parallel.axes import Rules, make_rules, owning_axes
from spmdtrain.parallel.copies import Copies, copies_of
from spmdtrain.parallel.gather import gathered_axes
from spmdtrain.parallel.matmuls.tensor_matmul import check_matmuls
from spmdtrain.parallel.mesh import build_mesh
from spmdtrain.parallel.padding import Padding, Shape, pad_vocabulary, round_up
from spmdtrain.parallel.reduce import Reduction, codec_of, reduction, scatter_dim, scattered_spec
from spmdtrain.parallel.regions import MANUAL_AXES
from spmdtrain.pipeline.choose import choose_table
from spmdtrain.pipeline.schedule import Table
from spmdtrain.train import items, token_loss
from spmdtrain.train.batch import (
    Batch,
    BatchShape,
    ContextWay,
    Samples,
    abstract_batch,
    choose_way,
    cut_batch,
    to_devices,
)
from spmdtrain.train.item import Specs, Start
from spmdtrain.train.state import Shapes, TrainState, abstract_state, fresh_state
from spmdtrain.train.token_loss import TokenLoss
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.chosen_rules import with_update_rules
from spmdtrain.train.updates.learning_rates import LearningRate, make_learning_rate


@dataclass(frozen=True)
class Setup:
    """Everything that a training step consists of.

    Specs and reductions are by dotted parameter path.
    """

    config: RunConfig  # with its vocabulary resolved
    make: MakeModel
    mesh: Mesh
    rules: Rules
    model: AbstractModel
    batch_shape: BatchShape
    way: ContextWay  # of attention to the keys of other devices
    update_rules: optimizers.UpdateRules  # the rule of each parameter that is not frozen
    learning_rate: LearningRate  # of a 0-based step, a float32 scalar
    loss: TokenLoss | None  # None: cross-entropy, as the settings shape it
    pipeline: Table | None  # its schedule; None if the mesh has one stage
    specs: Specs  # where parameters rest, with their reduced gradients, moments and updates
    padding: Padding  # of the parameters, if the mesh does not divide a dim
    reductions: Mapping[str, Reduction]  # of the gradients that a shard has accumulated
    copies: Mapping[str, Copies]  # of the weights, if several devices share one sequence
    gathered: Mapping[str, tuple[str, ...]]  # the axes over which a layer gathers each weight
    state: TrainState  # abstract: shapes, dtypes and shardings

    @property
    def gathers_by_layer(self) -> bool:
        """True if layers gather weights for their own use, one layer at a time.

        They do without a pipeline. With one, a weight is gathered once for all ticks.
        """
        return any(self.gathered.values()) and self.pipeline is None

    def rounding_key(self, step: jax.Array) -> jax.Array | None:
        """Returns the key from which weights are rounded after a step; None: to nearest."""
        if self.config.precision.rounding == "nearest":
            return None
        return jax.random.fold_in(random_key(self.config.train.seed, "rounding"), step)

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An abstract training batch."""
        zigzag = self.way.zigzag
        return abstract_batch(self.batch_shape, self.config, self.mesh, self.rules, zigzag)

    def to_devices(self, samples: Samples, ids: np.ndarray) -> Batch:
        """Returns the samples `ids` [global_batch] as a batch of this run: see `to_devices`."""
        zigzag = self.way.zigzag
        return to_devices(samples, ids, self.batch_shape, self.mesh, self.rules, zigzag)


def shard(
    config: RunConfig,
    make: MakeModel | str | None = None,
    devices: Sequence[jax.Device] | None = None,
    *,
    optimizer: optimizers.Optimizer | None = None,
    learning_rate: LearningRate | None = None,
    loss: TokenLoss | None = None,
) -> Setup:
    """Returns the setup of `config` on these devices (default: all). Allocates nothing.

    `config.model.vocab` must be set (`config.with_vocab`). Raises ConfigError if the settings, the
    model and the devices do not fit.

    Args:
      make: `make(config, rngs)` builds the model; or the name of a class, like `model.make`, which
        is the default. With an argument `extra` it takes the settings of [model.extra].
      optimizer: an optax transformation for all parameters, or `optimizer(path, parameter)`, which
        returns one, a `Rule` (with its own rate), or None to freeze the parameter. It must leave
        the learning rate out, as `optax.scale_by_adam()` does. Default: `config.optimizer`.
      learning_rate: `learning_rate(step)`, the rate of the 0-based step, in jax.numpy; replaces
        `optimizer.learning_rate`, `schedule`, `warmup` and `final_learning_rate`.
      loss: `loss(logits, targets)`, float32 [b, t, v] and int32 [b, t], returns the losses [b, t]
        of the tokens, or several by name, `loss` among them; training minimises the mean of their
        sum. It is called with a part of the tokens at once. Evaluation has only `loss`. Pass
        values that are only reported through `jax.lax.stop_gradient`. Default: cross-entropy.
    """
    check_config(config)
    mesh = build_mesh(config.mesh, devices, config.origin)
    return shard_on(config, mesh, make, optimizer=optimizer, learning_rate=learning_rate, loss=loss)


def shard_on(
    config: RunConfig,
    mesh: Mesh,
    make: MakeModel | str | None = None,
    *,
    optimizer: optimizers.Optimizer | None = None,
    learning_rate: LearningRate | None = None,
    loss: TokenLoss | None = None,
) -> Setup:
    """Returns the setup, as `shard` does, on a given mesh, which may be abstract."""
    config, make = choose_model(config, make)
    rules = make_rules(config.rules, mesh.shape)
    check_matmuls(config, rules, mesh)
    batch_shape = cut_batch(config.train, rules)
    stages = mesh.shape["pipeline"]
    table = pipeline_schedule(config, stages, batch_shape) if stages > 1 else None
    model = build_model(config, make, stages, config.pipeline.chunks)
    model, update_rules = with_update_rules(config, model, optimizer)
    _check_frozen(config, model)
    _check_multi_token(config, model, stages)
    if loss is not None:
        token_loss.check(config.train, loss, config.vocab)
    specs, padding, state = lay_to_rest(config, mesh, model, update_rules, config.train.zero)
    reduced = [axis for axis in MANUAL_AXES if mesh.shape[axis] > 1]

    gathered = {
        path: gathered_axes(spec, model.parameters[path].axes) for path, spec in specs.items()
    }

    def reduction_of(path: str) -> Reduction:
        """Leaves out the axes over which layers gather: they scatter their own gradients."""
        scattered = gathered[path] if table is None else ()
        axes = [axis for axis in reduced if axis not in scattered]
        parameter = model.parameters[path]
        shape = parameter.shape[parameter.apart :]
        codec = codec_of(config.compression, shape, mesh.shape["data"])
        return reduction(specs[path], axes, owning_axes(parameter.axes), codec)

    def copies(path: str) -> Copies:
        """Returns no copies if layers gather the weight.

        They scatter its gradient in each microbatch, also over the axes of the tokens.
        """
        parameter = model.parameters[path]
        by_layer = table is None and gathered[path]
        if by_layer or not parameter.is_of_matmuls:
            return Copies()
        return copies_of(rules, specs[path], parameter.stacked)

    return Setup(
        config=config,
        make=make,
        mesh=mesh,
        rules=rules,
        model=model,
        batch_shape=batch_shape,
        way=choose_way(config, rules, model.keeps_order),
        update_rules=update_rules,
        learning_rate=make_learning_rate(config, learning_rate),
        loss=loss,
        pipeline=table,
        specs=specs,
        padding=padding,
        reductions={path: reduction_of(path) for path in specs},
        copies={path: copies(path) for path in specs},
        gathered=gathered,
        state=state,
    )


def _check_frozen(config: RunConfig, model: AbstractModel) -> None:
    """Refuses a dtype of frozen weights if there are none."""
    dtype = config.precision.frozen
    is_asked = config.precision.is_given("frozen")
    if is_asked and not any(each.is_frozen for each in model.parameters.values()):
        raise ConfigError(
            f"precision.frozen={dtype!r}: no weight of this run is frozen",
            fix="--set finetune.kind=lora, or --set precision.frozen=none",
        )


def _check_multi_token(config: RunConfig, model: AbstractModel, stages: int) -> None:
    """Refuses runs in which no further tokens can be predicted."""
    if config.model.multi_token is None:
        return
    if stages > 1:
        why = f"on mesh.pipeline={stages}: each of its stages would run the further blocks"
    elif config.train.learns_pairs:
        why = f"with train.preference={config.train.preference!r}, a loss of whole answers"
    elif model.corrupt is not None:
        why = "with a model that restores tokens"
    elif not hasattr(model.bind({}), "predict_further"):
        why = "with a model that has no predict_further"
    else:
        return
    fix = "--set model.multi_token=none"
    raise ConfigError(f"model.multi_token does not go {why}", fix=fix)


def lay_to_rest(
    config: RunConfig,
    mesh: Mesh,
    model: AbstractModel,
    update_rules: optimizers.UpdateRules,
    zero: int,
    shapes: Shapes | None = None,
) -> tuple[Specs, Padding, TrainState]:
    """Returns (specs, padding, abstract state) of a model between the steps on this mesh.

    `zero` replaces `train.zero`. `shapes`: those of `fresh_shapes`, for callers that have them,
    e.g. a search over meshes.
    """
    rules = make_rules(config.rules, mesh.shape)
    specs, padding = resting_specs(model, rules, zero)
    state = abstract_state(model, update_rules, config, mesh, specs, padding, shapes)
    return specs, padding, state


def check_setup(setup: Any) -> None:
    """Raises ConfigError if a caller passes anything but a setup."""
    if not isinstance(setup, Setup):
        found = type(setup).__name__
        raise ConfigError("setup= takes a Setup", found=found, fix="st.shard(config)")


def init_state(setup: Setup) -> TrainState:
    """Returns the state at step 0, each leaf born in its shards; values depend only on the seed.

    Raises ConfigError if `train.epochs` has not been converted to steps, which the learning rate
    needs.
    """
    check_setup(setup)
    return fresh_but_for(setup, ())


def fresh_but_for(setup: Setup, given: Collection[str]) -> TrainState:
    """Returns `init_state` without the parameters at the paths `given`: they never exist."""
    epochs = setup.config.train.epochs
    if epochs is not None:
        raise ConfigError(
            f"train.epochs={epochs:g} has not been counted in steps yet",
            fix="config, data = open_data(config), and then shard(config)",
        )

    def lacking(state: TrainState) -> TrainState:
        left = {path: x for path, x in state.params.items() if path not in given}
        return replace(state, params=left)

    def fresh(key: jax.Array) -> TrainState:
        whole = fresh_state(
            setup.model,
            setup.update_rules,
            setup.config,
            key,
            setup.mesh,
            setup.specs,
            setup.padding,
        )
        return lacking(whole)

    shardings = jax.tree.map(lambda x: x.sharding, lacking(setup.state))
    return jax.jit(fresh, out_shardings=shardings)(random_key(setup.config.train.seed, "init"))


def with_items_begun(setup: Setup, state: TrainState, names: Collection[str]) -> TrainState:
    """Returns the state with these items begun from its weights."""
    if not names:
        return state
    asked = {name: setup.state.items[name] for name in names}
    shardings = jax.tree.map(lambda x: x.sharding, asked)

    def begin(params: dict[str, jax.Array]) -> items.Values:
        learned = optimizers.learned(setup.update_rules)
        start = Start(setup.config, params, learned, setup.specs, setup.mesh.shape)
        begun = items.begin(start)
        return {name: begun[name] for name in asked}

    begun = jax.jit(begin, out_shardings=shardings)(state.params)
    return replace(state, items=state.items | begun)


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
    of_model = {path: each.shape for path, each in model.parameters.items()}
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


def pipeline_schedule(config: RunConfig, stages: int, shape: BatchShape) -> Table:
    """Returns the schedule that the run asks for, as a table."""
    asked = config.pipeline
    table = choose_table(asked.schedule, stages, asked.chunks, shape.accumulation)
    if table.split and config.train.remat != "none":
        raise ConfigError(
            f"train.remat={config.train.remat!r}: "
            f"{asked.schedule!r} takes a layer's backward apart",
            fix="--set train.remat=none",
        )
    return table
