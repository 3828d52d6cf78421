"""A model of one's own as the planner sees it.

Parameters, gradients and optimizer state are counted in the model's abstract state, layout by
layout, and its FLOPs in its program. What a layer keeps for its backward and what a step takes
beside matmuls are those of a transformer of the sizes in [model], with as many FLOPs. XLA knows
better: `plan --compile`, `estimate --compile`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.workload import MeshShape, ModelShape, Workload, model_shape

if TYPE_CHECKING:
    from spmdtrain.train.updates.optimizers import Optimizer


class OwnState(NamedTuple):
    """The state that rests on one device.

    Bytes of `parameters` and of the `optimizer` (with an average of the weights). `resident`: the
    elements that it would have if `data` and `fsdp` split no weight.
    """

    parameters: int
    optimizer: int
    resident: int


class OwnModel:
    """The model that `model.make` of a config names. `model.vocab` must be set."""

    def __init__(self, config: RunConfig, optimizer: "Optimizer | None" = None):
        from spmdtrain.models.choose import choose_model

        self._config, self._make = choose_model(config)
        self._optimizer = optimizer
        self.refusal: ConfigError | None = None  # the last layout that it cannot have
        self.divided = model_shape(config)  # whose sizes a mesh is to divide
        self.shape = shape_of_own(config, self.divided)
        self._built = cache(self._build)
        self._states = cache(self._state)

    def state(self, workload: Workload) -> OwnState:
        """The state of a device in this layout. ConfigError where a run would refuse it."""
        return self._states(workload.mesh, workload.chunks, workload.zero)

    def allows(self, workload: Workload) -> bool:
        """True if a run would not refuse this layout for its weights."""
        try:
            self.state(workload)
        except ConfigError as error:
            self.refusal = error
            return False
        return True

    def _build(self, stages: int, chunks: int) -> tuple[Any, Any]:
        """The abstract model for so many stages, and the shapes of its optimizer state."""
        import jax

        from spmdtrain.models.abstract import build_model, cast
        from spmdtrain.train.updates import optimizers
        from spmdtrain.train.updates.shipped_optimizers import shipped_rules

        config = self._config
        model = build_model(config, self._make, stages, chunks)
        trained = {path: each for path, each in model.parameters.items() if each.is_trained}
        if self._optimizer is None:
            rules = shipped_rules(config.optimizer, trained)
        else:
            rules = optimizers.choose_rules(self._optimizer, trained, model.layout)

        def fresh(key: jax.Array) -> tuple[Any, Any]:
            params = cast(model.init(key), config.precision.params)
            return params, optimizers.init(rules, model.parameters, params)

        return model, jax.eval_shape(fresh, jax.random.key(0))

    def _state(self, mesh_shape: MeshShape, chunks: int, zero: int) -> OwnState:
        import jax

        from spmdtrain.parallel.axes import make_rules
        from spmdtrain.parallel.mesh import AXES
        from spmdtrain.train.setup import resting_specs
        from spmdtrain.train.state import spec_beside

        mesh: Any = jax.sharding.AbstractMesh(tuple(mesh_shape.sizes[axis] for axis in AXES), AXES)
        model, (params, moments) = self._built(mesh_shape.pipeline, chunks)
        rules = make_rules(self._config.rules, mesh.shape)
        specs, padding = resting_specs(model, rules, zero)

        def bytes_here(path: str, leaves: Any) -> Iterator[int]:
            at_rest = padding.at_rest[path]
            stacked = model.parameters[path].stacked
            for leaf in jax.tree.leaves(leaves):
                shape = at_rest if leaf.shape == padding.of_model[path] else leaf.shape
                spec = spec_beside(shape, at_rest, stacked, specs[path])
                part = jax.sharding.NamedSharding(mesh, spec).shard_shape(shape)
                yield math.prod(part) * leaf.dtype.itemsize

        # The average of a weight is float32, and rests as the weight does.
        of_params = {path: sum(bytes_here(path, leaf)) for path, leaf in params.items()}
        of_moments = sum(sum(bytes_here(path, tree)) for path, tree in moments.items())
        if self._config.optimizer.ema:
            sizes = {path: params[path].dtype.itemsize for path in moments}
            of_moments += sum(4 * of_params[path] // size for path, size in sizes.items())
        counter = 4  # bytes of the step
        unsplit = replace(mesh_shape, data=1, fsdp=1)
        resident = sum(of_params[path] // leaf.dtype.itemsize for path, leaf in params.items())
        if unsplit != mesh_shape:
            resident = self._states(unsplit, chunks, 0).resident
        return OwnState(sum(of_params.values()), of_moments + counter, resident)


def shape_of_own(config: RunConfig, shape: ModelShape) -> ModelShape:
    """The transformer that stands for a model of one's own: `shape`, with as many FLOPs a token.

    They are counted in the model's own program and differ in the width of the mlp. A program whose
    FLOPs cannot be counted leaves the shape as it is.
    """
    from spmdtrain.models.abstract import build_model
    from spmdtrain.models.choose import choose_model
    from spmdtrain.models.flops import counted_flops_per_token

    config, make = choose_model(config)
    length = config.train.sequence_length
    counted = counted_flops_per_token(config, build_model(config, make))
    if counted is None:
        return shape
    missing = (counted - model_flops_per_token(shape, length)) / 6 / shape.layers
    matrices = 3 if shape.gated else 2  # of the mlp, embed x ffn each
    ffn = shape.ffn + missing / (matrices * shape.embed)
    return replace(shape, ffn=max(1, round(ffn)))


def describe(config: RunConfig) -> str:
    """Says in one line which part of an estimate is of this model itself."""
    return (
        f"{config.model.make}: parameters, gradients, optimizer state and FLOPs are its own; "
        "activations, and times beside matmuls, are those of a transformer with as many FLOPs "
        "(--compile asks XLA)"
    )
