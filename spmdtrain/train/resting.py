"""Decides where parameters rest between steps: their specs, their padding, and the state that
follows.

No other code derives a spec.
"""

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.axes import Rules, make_rules
from spmdtrain.parallel.padding import Padding, Shape, pad_vocabulary, round_up
from spmdtrain.parallel.reduce import scatter_dim, scattered_spec
from spmdtrain.train.items.item import Specs
from spmdtrain.train.items.items import Items
from spmdtrain.train.state import Shapes, TrainState, abstract_state
from spmdtrain.train.updates import optimizers


def lay_to_rest(
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
