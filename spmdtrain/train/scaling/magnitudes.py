"""Keeps the largest magnitudes of the last steps, by which `precision.scaling = "delayed"` scales.

For each weight that is multiplied in 8 bits they are those of its values, and of the gradient of
its product, over all devices and microbatches of a step; float32 [*stack, steps, 2], the last step
first, and 0 for a step that saw none. Gradients are those of a loss that no loss scale multiplies.

A skipped step leaves them as they were, since its gradients may be what was wrong. Where they are
shorter or longer in a checkpoint, they begin with its last steps.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import RunConfig
from spmdtrain.models.abstract import AbstractModel
from spmdtrain.train.items.item import Item, Start, Taken, whole

NAME = "magnitudes"
History = dict[str, jax.Array]  # by dotted path of the weight


def remembered(
    config: RunConfig,
    model: AbstractModel,
    sizes: Mapping[str, int],  # noqa: ARG001
) -> dict[str, tuple[int, ...]]:
    """Returns the dims that stack layers, by path of each weight whose matmul has a history; they
    are the same on any mesh.
    """
    if config.precision.scaling != "delayed":
        return {}
    weights = {path: weight for path, weight in model.parameters.items() if weight.narrow}
    return {path: weight.shape[: weight.stacked] for path, weight in weights.items()}


def pushed(history: History, largest: Mapping[str, jax.Array]) -> History:
    """Returns the history after a step with these largest magnitudes, [*stack, 2]."""

    def push(earlier: jax.Array, latest: jax.Array) -> jax.Array:
        return jnp.concatenate([latest[..., None, :], earlier[..., :-1, :]], -2)

    return {path: push(earlier, largest[path]) for path, earlier in history.items()}


def _begin(start: Start) -> History | None:
    steps = start.config.precision.scaling_history
    stacks = start.subjects.get(NAME, {})
    return {path: jnp.zeros((*stack, steps, 2)) for path, stack in stacks.items()} or None


def _update(history: History, taken: Taken) -> History:
    return pushed(history, taken.made[NAME])


def _in_length(history: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    latest = history[..., : shape[-2], :]
    missing = shape[-2] - latest.shape[-2]
    return jnp.pad(latest, [(0, 0)] * (latest.ndim - 2) + [(0, missing), (0, 0)])


ITEM = Item(NAME, begin=_begin, rests=whole, update=_update, subjects=remembered, fold=_in_length)
