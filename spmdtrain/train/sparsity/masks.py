"""Keeps the masks of [sparsity]: which elements of a matrix stay, while the others are zero.

An update moves all elements; after it those that do not stay are set to zero again. Momentum and
gradients stay dense: an element that was zero may come back when it is chosen anew, if one update
makes it larger than one that stays.

A mask is a bool array, True where an element stays, sharded like its weight. Each layer and each
expert has its own choice. If more elements stay than should, because the step of a choice was
skipped or because a run resumes with other settings, the choice is made after the next step.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import SparsityConfig
from spmdtrain.models.abstract import Parameter, over_stack
from spmdtrain.train.items.item import Item, Moved, Projected, Start, Taken, as_parameters, masked
from spmdtrain.train.part import Part
from spmdtrain.train.setup import Setup
from spmdtrain.train.sparsity.chosen import input_dim, sparse_parameters
from spmdtrain.train.sparsity.elements import largest, largest_of_each
from spmdtrain.train.sparsity.timetable import has_zeros, is_time, number_kept

Masks = dict[str, jax.Array]  # by dotted path of the matrices that are sparse
NAME = "masks"
ZEROS = "zeros"


def _begin(start: Start) -> Masks | None:
    """Returns masks that keep every element, or for `kept` every one that is not zero."""
    sparse = start.subjects.get(NAME)
    if not sparse:
        return None
    if start.config.sparsity.pattern == "kept":
        return {path: start.params[path] != 0 for path in sparse}
    return {path: jnp.ones(start.params[path].shape, bool) for path in sparse}


def _project(masks: Masks, moved: Moved) -> Projected:
    """Returns the masks of this step, and its weights with zeros."""
    settings = moved.config.sparsity
    if settings.chooses:
        due = is_time(settings, moved.step) | _too_many_stay(settings, masks, moved)
        weights = {path: moved.params[path] for path in masks}
        choose = partial(_chosen, settings, moved)
        masks = jax.lax.cond(due, choose, lambda _, masks: masks, weights, masks)
    sparse = {path: masked(moved.params[path], mask) for path, mask in masks.items()}
    figures = {ZEROS: _share_of_zeros(masks, moved)}
    return Projected(masks, {**moved.params, **sparse}, figures, zeros=masks)


def _chosen(
    settings: SparsityConfig, moved: Moved, weights: Mapping[str, jax.Array], masks: Masks
) -> Masks:
    """Returns the masks that these weights at rest ask for, in place of `masks`."""

    def mask(path: str, x: jax.Array) -> jax.Array:
        parameter = moved.model.parameters[path]
        x = moved.padding.from_rest(path, x)
        if settings.group is not None:
            dim = input_dim(parameter) - parameter.apart
            choose = partial(largest_of_each, count=settings.group[0], size=settings.group[1])
            choose = partial(choose, dim=dim)
        else:
            count = number_kept(settings, _size(parameter), moved.step)
            choose = partial(largest, count=count)
        return moved.padding.to_rest(path, over_stack(choose, parameter.apart)(x))

    return {path: mask(path, weights[path]) for path in masks}


def _too_many_stay(settings: SparsityConfig, masks: Masks, moved: Moved) -> jax.Array:
    """Returns True if some mask keeps more elements than a choice before this step left."""
    more = []
    for path, stay in _numbers(masks, moved).items():
        wanted = number_kept(settings, _size(moved.model.parameters[path]), moved.step)
        more.append(jnp.any(stay > wanted))
    return jnp.stack(more).any() & has_zeros(settings, moved.step)


def _numbers(masks: Masks, moved: Moved) -> dict[str, jax.Array]:
    """Returns the number of elements that stay, int32, of each layer and expert."""

    def number(path: str, mask: jax.Array) -> jax.Array:
        mask = moved.padding.from_rest(path, mask)
        apart = moved.model.parameters[path].apart
        return jnp.sum(mask, tuple(range(apart, mask.ndim)), jnp.int32)

    return {path: number(path, mask) for path, mask in masks.items()}


def _share_of_zeros(masks: Masks, moved: Moved) -> jax.Array:
    """Returns the share of zeros in all masks, without the padding of a pipeline."""
    stay, total = jnp.float32(0), 0
    for path, numbers in _numbers(masks, moved).items():
        if moved.model.in_stack(path):
            numbers = moved.model.stage_layout.unstaged(numbers)
        stay += jnp.sum(numbers.astype(jnp.float32))
        total += numbers.size * _size(moved.model.parameters[path])
    return 1 - stay / total


def _size(parameter: Parameter) -> int:
    """Returns the number of elements of one layer's matrix, or of one expert's."""
    return math.prod(parameter.shape[parameter.apart :])


def _update(masks: Masks, taken: Taken) -> Masks:  # noqa: ARG001
    return taken.made[NAME].value


def _zeros(masks: Masks, taken: Taken) -> jax.Array:  # noqa: ARG001
    return taken.made[NAME].figures[ZEROS]


ITEM = Item(
    NAME,
    begin=_begin,
    rests=as_parameters,
    update=_update,
    subjects=sparse_parameters,
    project=_project,
    figures={ZEROS: _zeros},
)


def _join(setup: Setup) -> Setup:
    """Refuses an optimizer whose state holds a second copy of weights, which would stay dense."""
    config = setup.config
    copied = [path for path, rule in setup.update_rules.items() if rule.gradient_point is not None]
    if copied:
        raise ConfigError(
            f"sparsity.pattern={config.sparsity.pattern!r}: the optimizer takes gradients at a "
            f"second copy of the weights, which would stay dense, as of {copied[0]}",
            found=f"optimizer.name={config.optimizer.name!r}",
            fix="--set optimizer.name=adamw",
        )
    return setup


SPARSITY = Part("sparsity", items=(ITEM,), join=_join)
