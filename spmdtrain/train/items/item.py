"""Defines an item of the training state: a value that steps change and checkpoints keep.

Items come in addition to the weights and their optimizer state. An item defines its initial value,
how it is sharded, how a step changes it, and what happens if a checkpoint lacks it. Nothing else is
needed: the step, checkpoints, comparisons of replicas, `show` and the planner iterate over the
items of all parts (../part.py), and know none of them by name.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.parallel.axes import drop_axes
from spmdtrain.parallel.padding import Padding
from spmdtrain.train.batch import Batch

Specs = Mapping[str, P]  # by dotted parameter path
# By dotted path of the parameters that an item is about: what it has to know of each.
Subjects = Mapping[str, Any]
Metrics = dict[str, jax.Array]
# A tree of arrays. If an item is saved among the arrays of a checkpoint, it must be a dict.
Value = Any


@dataclass(frozen=True)
class Start:
    """The values from which an item may begin.

    `params`: the weights at rest, traced or abstract, and `specs`, their specs. `learned`: the
    paths of those that follow the slope of the loss. `sizes`: devices along each axis of the mesh.
    `subjects`: what `Item.subjects` has found, by the name of the item.
    """

    config: RunConfig
    params: Mapping[str, jax.Array]
    learned: Collection[str]
    specs: Specs
    sizes: Mapping[str, int]
    subjects: Mapping[str, Subjects] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """The weights that a step has moved, for items that change them once more; for tracing.

    `params`: the weights, at rest. `step`: the 1-based number of the step, an int32 scalar.
    """

    config: RunConfig
    model: AbstractModel
    padding: Padding
    step: jax.Array
    params: Mapping[str, jax.Array]


class Projected(NamedTuple):
    """An item with the weights that it has changed, and figures about both.

    `zeros`: by path, a bool array that is False for the elements that it holds at zero.
    """

    value: Value
    params: Mapping[str, jax.Array]
    figures: Metrics
    zeros: Mapping[str, jax.Array] = {}


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns x with zeros where the mask is False, whatever is there."""
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


@dataclass(frozen=True)
class Taken:
    """A step, as items see it when they are updated; for tracing.

    `params`: the weights that it made, at rest. `gradients`: those of the mean loss over the batch,
    clipped. `loss`, `grad_norm` (before clipping) and `number` (of what the loss is a mean over):
    float32 scalars. `good`: a bool; if it is false, the step did not change the weights; None:
    nothing judges steps. `made`: what the step has made for items, by the item's name: while it
    computed gradients, projected weights (`Projected`) or judged itself. `step`: its 0-based
    number, an int32 scalar, as in `Graded`.
    """

    config: RunConfig
    params: Mapping[str, jax.Array]
    gradients: Mapping[str, jax.Array]
    batch: Batch
    loss: jax.Array
    grad_norm: jax.Array
    number: jax.Array
    good: jax.Array | None = None
    made: Mapping[str, Value] = field(default_factory=dict)
    step: jax.Array | None = None

    def with_zeros(self, values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns arrays of the shapes of parameters, by path, with zeros where items hold the
        weights at zero.
        """
        projected = [value for value in self.made.values() if isinstance(value, Projected)]
        masks = {path: mask for item in projected for path, mask in item.zeros.items()}
        return {**values, **{path: masked(values[path], mask) for path, mask in masks.items()}}


@dataclass(frozen=True)
class Note:
    """The JSON form, in the meta of a checkpoint, of an item of a few numbers.

    `read(written, like)` returns numbers, or numpy arrays, in the structure and shapes of `like`,
    whatever shapes were written.
    """

    write: Callable[[Value], Any]
    read: Callable[[Any, Value], Value]


@dataclass(frozen=True)
class Item:
    """One item of the training state.

    `begin(start)` is its value before the first step, for tracing, or None if the settings do not
    ask for it. `rests(start, value)` returns the spec of each leaf: `as_parameters`, `whole` or
    `per_data_shard`. `update(value, taken)` is its value after a step. `figures` are what the step
    reports about it, by name: each is a function of the value before the step and the step.
    `subjects(config, model, sizes)` finds the parameters that it is about, before there are any,
    with `sizes` of the mesh axes; None: it is about all, or none.
    `project(value, moved)` changes the weights after their update, before the step is judged;
    None: it leaves them alone.

    `name` is its key in `TrainState.items`, and its name in a checkpoint: an identifier.
    """

    name: str
    begin: Callable[[Start], Value | None]
    rests: Callable[[Start, Value], Value]
    update: Callable[[Value, Taken], Value]
    subjects: Callable[[RunConfig, AbstractModel, Mapping[str, int]], Subjects] | None = None
    project: Callable[[Value, Moved], Projected] | None = None
    figures: Mapping[str, Callable[[Value, Taken], jax.Array]] = field(default_factory=dict)
    # Whether a step that does not change the weights keeps the item too, or updates it.
    when_skipped: Literal["keep", "update"] = "keep"
    # False: it may hold numbers that are not finite in a good state.
    is_finite: bool = True
    # None: it is among the arrays of a checkpoint, if it is saved at all.
    note: Note | None = None
    # False: it never changes, and whoever makes a state reads it anew from elsewhere.
    is_saved: bool = True
    # `lacking(where)`: the error for restoring a state from a checkpoint without it; None: it
    # begins anew there. A resumed run begins it anew in any case.
    lacking: Callable[[str], CheckpointError] | None = None
    # `fold(leaf, shape)`: converts a leaf that is not sharded like the parameters to its shape on
    # another mesh; None: it begins anew there. Of `per_data_shard` it converts the first dim only,
    # if the leaf has a parameter's path: the others follow the parameter.
    fold: Callable[[jax.Array, tuple[int, ...]], jax.Array] | None = None


def as_parameters(start: Start, value: Value) -> Value:
    """Returns the parameters' specs, for arrays by dotted path of parameters with the parameters'
    shapes.

    A checkpoint converts them to another pipeline layout or padding like the parameters.
    """
    return {path: start.specs[path] for path in value}


def whole(start: Start, value: Value) -> Value:  # noqa: ARG001
    """Returns specs with which every device holds the whole value."""
    return jax.tree.map(lambda _: P(), value)


def per_data_shard(start: Start, value: Value) -> Value:
    """Returns specs that split the first dim over `data`, so each shard holds its own value.

    An array at the path of a parameter, with the parameter's dims after the first, is split along
    them like the parameter in use.
    """

    def spec(path: tuple, x: jax.Array) -> P:
        name = getattr(path[0], "key", "") if path else ""
        if name not in start.specs or start.params[name].ndim != x.ndim - 1:
            return P("data")
        return P("data", *drop_axes(("data",), start.specs[name]))

    return jax.tree_util.tree_map_with_path(spec, value)
