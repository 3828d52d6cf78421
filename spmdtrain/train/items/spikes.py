"""Judges steps: a step is good if its loss and gradient norm are finite and within their limits.

A limit is `guard.grad_norm`, or `guard.sigmas` standard deviations above the mean of the last
`guard.window` good steps, whichever is less. The figures of those steps are part of the state, so
the step decides on the devices, and a resumed run decides as if it had never stopped. OLMo, MaxText
and Levanter judge spikes in the same way (`skip_step`).
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.config.schema import GuardConfig, RunConfig
from spmdtrain.train.items.item import Item, Note, Start, Taken, Value, whole
from spmdtrain.train.part import Part


def no_figures(guard: GuardConfig) -> np.ndarray | None:
    """Returns the initial figures of good steps: float32 [window, 2], all infinite.

    A row is a loss and a gradient norm, the newest last. None if nothing needs them.
    """
    return None if guard.window is None else np.full((guard.window, 2), np.inf, np.float32)


def limits(guard: GuardConfig, recent: jax.Array | None) -> jax.Array:
    """Returns the largest loss and gradient norm of a good step, float32 [2].

    They are infinite if unlimited. `recent`: the figures of the last good steps. They set no limit
    until half of them exist.
    """
    largest_norm = jnp.inf if guard.grad_norm is None else guard.grad_norm
    fixed = jnp.array([jnp.inf, largest_norm], jnp.float32)
    if recent is None or guard.window is None:
        return fixed
    is_there = jnp.isfinite(recent)
    count = is_there[:, 0].sum()
    mean = jnp.where(is_there, recent, 0).sum(0) / jnp.maximum(count, 1)
    squares = jnp.where(is_there, (recent - mean[None]) ** 2, 0).sum(0)
    deviation = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
    spike = jnp.minimum(fixed, mean + guard.sigmas * deviation)
    return jnp.where(2 * count >= guard.window, spike, fixed)


def is_good(figures: jax.Array, largest: jax.Array) -> jax.Array:
    """Returns True if a step with this loss and gradient norm [2] is good.

    `largest`: the limits of both [2].
    """
    return (jnp.isfinite(figures) & (figures <= largest)).all()


def remember(recent: jax.Array, figures: jax.Array, good: jax.Array) -> jax.Array:
    """Returns `recent` with the figures [2] of this step appended, unless it was bad."""
    return jnp.where(good, jnp.concatenate([recent[1:], figures[None]]), recent)


def judge(
    config: RunConfig, items: Mapping[str, Value], loss: jax.Array, grad_norm: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the largest loss and gradient norm of a good step, [2], by the name of the item, and
    whether this is one.

    `items`: of the state before the step.
    """
    largest = limits(config.guard, items.get(ITEM.name))
    return {ITEM.name: largest}, is_good(jnp.stack([loss, grad_norm]), largest)


def _begin(start: Start) -> jax.Array | None:
    figures = no_figures(start.config.guard)
    return None if figures is None else jnp.array(figures)


def _update(recent: jax.Array, taken: Taken) -> jax.Array:
    """Records a good step, unless it has no loss at all."""
    assert taken.good is not None, "where steps are judged by those before them, they are judged"
    figures = jnp.stack([taken.loss, taken.grad_norm])
    return remember(recent, figures, taken.good & (taken.number > 0))


def _limit(index: int, recent: jax.Array, taken: Taken) -> jax.Array:  # noqa: ARG001
    return taken.made[ITEM.name][index]


def rows_of(recent: jax.Array) -> list[list[float]]:
    """Returns the rows that exist, oldest first, as JSON, in which float32 is exact."""
    rows = np.asarray(recent)
    return rows[np.isfinite(rows[:, 0])].tolist()


def recent_of(rows: list[list[float]], like: jax.Array | jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns the figures of good steps in these rows, or the newest that fit."""
    recent = np.full(like.shape, np.inf, like.dtype)
    newest = rows[-len(recent) :]
    if newest:
        recent[-len(newest) :] = newest
    return recent


ITEM = Item(
    "recent",
    begin=_begin,
    rests=whole,
    update=_update,
    figures={"loss_limit": partial(_limit, 0), "grad_norm_limit": partial(_limit, 1)},
    when_skipped="update",
    is_finite=False,  # rows that do not exist yet
    note=Note(rows_of, recent_of),
)
SPIKES = Part("spikes", items=(ITEM,))
