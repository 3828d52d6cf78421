"""Operations on all items of a training state.

A new item is an `Item` (item.py) of a part (../part.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.train.items.item import (
    Item,
    Metrics,
    Moved,
    Projected,
    Start,
    Subjects,
    Taken,
    Value,
    as_parameters,
)

Values = dict[str, Value]  # by the name of the item
Params = dict[str, jax.Array]  # by dotted path, at rest


@dataclass(frozen=True)
class Items:
    """The items that a state may have, in the order in which a step updates them."""

    table: tuple[Item, ...]

    def of(self, values: Mapping[str, Value]) -> Iterator[tuple[Item, Value]]:
        """Yields the items that a state has, with their values."""
        return ((item, values[item.name]) for item in self.table if item.name in values)

    def subjects(
        self, config: RunConfig, model: AbstractModel, sizes: Mapping[str, int]
    ) -> dict[str, Subjects]:
        """Returns the parameters that each item tracks, by the item's name; see `Start`."""
        return {
            item.name: item.subjects(config, model, sizes) for item in self.table if item.subjects
        }

    def begin(self, start: Start) -> Values:
        """Returns the items that the settings ask for, before the first step; for tracing."""
        begun = {item.name: item.begin(start) for item in self.table}
        return {name: value for name, value in begun.items() if value is not None}

    def shapes(self, start: Start) -> Values:
        """Returns the items of `begin` as ShapeDtypeStructs; `start.params` may be abstract too."""
        return jax.eval_shape(
            lambda params: self.begin(replace(start, params=params)), dict(start.params)
        )

    def abstract(self, start: Start, mesh: Mesh) -> Values:
        """Returns the items of `shapes`, each with its sharding."""
        return {
            item.name: jax.tree.map(
                lambda x, spec: at_rest(x, mesh, spec), value, item.rests(start, value)
            )
            for item, value in self.of(self.shapes(start))
        }

    def project(
        self, values: Mapping[str, Value], moved: Moved
    ) -> tuple[Params, dict[str, Projected]]:
        """Returns the weights as items leave them after their update, and what the items made; for
        tracing.
        """
        projected = {}
        for item, value in self.of(values):
            if item.project:
                projected[item.name] = item.project(value, moved)
                moved = replace(moved, params=projected[item.name].params)
        return dict(moved.params), projected

    def after_step(self, values: Values, taken: Taken) -> tuple[Values, Metrics]:
        """Returns the items after a step, and the figures that the step reports; for tracing."""
        after = {}
        figures: Metrics = {}
        for item, value in self.of(values):
            figures |= {name: figure(value, taken) for name, figure in item.figures.items()}
            new = item.update(value, taken)
            if taken.good is not None and item.when_skipped == "keep":
                new = unless_skipped(taken.good, new, value)
            after[item.name] = new
        return after, figures

    @property
    def figure_names(self) -> set[str]:
        """The names of all figures that steps report about items."""
        return {name for item in self.table for name in item.figures}

    def by_parameter(self, values: Mapping[str, Value]) -> list[Mapping[str, Value]]:
        """Returns the values that are sharded like the parameters, each by dotted path."""
        return [value for item, value in self.of(values) if item.rests is as_parameters]

    def saved(self, values: Mapping[str, Value]) -> Values:
        """Returns the values that a checkpoint holds."""
        return {item.name: value for item, value in self.of(values) if item.is_saved}

    def finite(self, values: Mapping[str, Value]) -> list[Value]:
        """Returns the values that must be finite in a good state."""
        return [value for item, value in self.of(values) if item.is_finite]


NO_ITEMS = Items(())


def at_rest(x: Any, mesh: Mesh, spec: P, memory: str | None = None) -> Any:
    """Returns a ShapeDtypeStruct with the shape and dtype of `x`, sharded by `spec`.

    `memory`: the kind of memory; None: that of the device.
    """
    sharding = NamedSharding(mesh, spec, memory_kind=memory)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def unless_skipped(good: jax.Array, after: Value, before: Value) -> Value:
    """Returns `after` if the step is good, else `before`, bit for bit."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
