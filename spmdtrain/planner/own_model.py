"""Sizes a custom model for the planner.

Parameters, gradients and optimizer state are counted in the abstract state of the model, for each
layout, and FLOPs in its program. Kept activations, and the time of a step apart from matmuls, are
those of a transformer of the sizes in [model] with as many FLOPs. `plan --compile` and `estimate
--compile` ask XLA for the real figures.
"""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig, TransformerConfig
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.memory import exact_state, held_elements, resident_elements
from spmdtrain.planner.cost.workload import MeshShape, Workload, model_of

if TYPE_CHECKING:
    from spmdtrain.train.updates.optimizers import Optimizer


class OwnState(NamedTuple):
    """The state at rest on one device.

    `parameters` are bytes, and `optimizer` those of everything else in the state. `resident`: the
    number of weight elements if `data` and `fsdp` split no weight.
    """

    parameters: int
    optimizer: int
    resident: int


class OwnModel:
    """The custom model that `model.make` names. `model.vocab` must be set."""

    def __init__(self, config: RunConfig, optimizer: "Optimizer | None" = None):
        from spmdtrain.models.choose import choose_model

        self._config, self._make = choose_model(config)
        self._optimizer = optimizer
        self.refusal: ConfigError | None = None  # why the model does not allow the last layout
        self.divided = model_of(config)  # a mesh must divide its sizes
        self.shape = with_own_flops(config, self.divided)
        self._built = cache(self._build)
        self._states = cache(self._state)

    def state(self, workload: Workload) -> OwnState:
        """Returns the state of a device in this layout.

        Raises ConfigError if a run would refuse it.
        """
        return self._states(workload.mesh, workload.chunks, workload.zero)

    def allows(self, workload: Workload) -> bool:
        """Returns True if a run would accept this layout for its weights."""
        try:
            self.state(workload)
        except ConfigError as error:
            self.refusal = error
            return False
        return True

    def _build(self, stages: int, chunks: int) -> tuple[Any, Any, Any]:
        """Returns the abstract model for `stages`, its update rules, and its state's shapes."""
        from spmdtrain.models.abstract import build_model
        from spmdtrain.train.state import fresh_shapes
        from spmdtrain.train.updates.chosen_rules import with_update_rules

        model = build_model(self._config, self._make, stages, chunks)
        model, update_rules = with_update_rules(self._config, model, self._optimizer)
        return model, update_rules, fresh_shapes(model, update_rules, self._config)

    def _state(self, mesh_shape: MeshShape, chunks: int, zero: int) -> OwnState:
        import jax

        from spmdtrain.parallel.mesh import AXES
        from spmdtrain.train.all_parts import items_of, parts_of
        from spmdtrain.train.state import bytes_per_device, place_at_rest, resting_bytes

        mesh: Any = jax.sharding.AbstractMesh(tuple(mesh_shape.sizes[axis] for axis in AXES), AXES)
        model, update_rules, shapes = self._built(mesh_shape.pipeline, chunks)
        items = items_of(parts_of(self._config))
        _, _, state = place_at_rest(self._config, mesh, model, update_rules, zero, items, shapes)
        unsplit = replace(mesh_shape, data=1, fsdp=1)
        if unsplit != mesh_shape:
            resident = self._states(unsplit, chunks, 0).resident
        else:
            resident = sum(bytes_per_device(x) // x.dtype.itemsize for x in state.params.values())
        return OwnState(*resting_bytes(state, items), resident)


def with_traced_optimizer_state(config: RunConfig, workload: Workload) -> Workload:
    """Returns the workload of a shipped model with the size of its traced optimizer state.

    `moments` is counted in the abstract state on one device, since tables and vectors may have
    other moments than matrices, and the size of factors depends on shapes. The workload of a custom
    model stays the same, because its state is counted for each layout.
    """
    if config.model.make:
        return workload
    beside_weights = config.optimizer.model_copy(update={"memory": "device"})
    # One device has many microbatches, which the state does not depend on.
    at_once = config.train.model_copy(update={"microbatch": None})
    config = config.model_copy(update={"optimizer": beside_weights, "train": at_once})
    alone = replace(workload, mesh=MeshShape(), zero=0)
    _, of_optimizer = exact_state(config, alone.mesh.sizes)
    _, elements = held_elements(alone, resident_elements(alone))
    if not elements:
        return workload
    moments = (of_optimizer / elements - workload.item_bytes) / workload.moment_bytes
    # Without what a few scalars add: the workload is that of `estimate` again.
    return replace(workload, moments=round(max(0.0, moments), 4))


def with_own_flops(config: RunConfig, model: TransformerConfig) -> TransformerConfig:
    """Returns a transformer that stands for a custom model: `model`, with as many FLOPs a token.

    They are counted in the model's own program, and the width of the mlp is adjusted to match. If
    the FLOPs of a program cannot be counted, it is unchanged.
    """
    from spmdtrain.models.abstract import build_model
    from spmdtrain.models.choose import choose_model
    from spmdtrain.models.counted_flops import forward_flops_per_token

    config, make = choose_model(config)
    length = config.train.sequence_length
    forward = forward_flops_per_token(config, build_model(config, make))
    if forward is None:
        return model
    missing = (3 * forward - model_flops_per_token(model, length)) / 6 / model.layers
    matrices = 3 if model.is_gated else 2  # of the mlp, embed x ffn each
    ffn = model.ffn + missing / (matrices * model.embed)
    return model.model_copy(update={"ffn": max(1, round(ffn))})


def describe(config: RunConfig) -> str:
    """Returns a line on the parts of an estimate that are specific to this model."""
    return (
        f"{config.model.make}: parameters, gradients, optimizer state and FLOPs are its own; "
        "activations, and times apart from matmuls, are those of a transformer with as many FLOPs "
        "(--compile asks XLA)"
    )
