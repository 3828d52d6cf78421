"""Measures with siblings how far rounding alone moves the figures of a replay.

A sibling starts with every weight moved by two units in the last place, up or down at random. Up to
rounding it is the same run, as is a run on another mesh, so the distance between siblings is the
scale for another mesh. A constant would not do: how fast rounding grows depends on the model and on
the number of steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.lab.replay.again import steps_again
from spmdtrain.lab.replay.opened import Opened
from spmdtrain.train.state import TrainState

SIBLINGS = 3
ULPS = 2  # units in the last place by which a sibling moves each weight
MARGIN = 8.0  # multiple of the distance of the siblings: correct layouts stay below 2
EPSILONS = 4.0  # of float32, relative to a figure: closer values count as equal
FIGURES = ("loss", "grad_norm")


def figures_again(
    opened: Opened, last: int, state: TrainState | None = None
) -> list[dict[str, Any]]:
    """Returns the figures of the steps after `opened.start`, up to `last`."""
    return [again.figures for again in steps_again(opened, last, state=state)]


def limits(
    opened: Opened, last: int, figures: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Returns the limits of a replay with these `figures`, from siblings with the same start."""
    compute = opened.setup.config.precision.compute
    siblings = [
        figures_again(opened, last, moved(opened.begin(), n, compute)) for n in range(SIBLINGS)
    ]
    return limits_among(figures, siblings)


def limits_among(
    figures_by_step: Sequence[Mapping[str, Any]], siblings: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, float]]:
    """Returns, for each step, how far rounding alone may move each of `FIGURES`.

    `figures_by_step` are those of the replay, and `siblings` has the same for each sibling. A limit
    never decreases from one step to the next.
    """
    reached = dict.fromkeys(FIGURES, 0.0)
    rows = []
    for at, figures in enumerate(figures_by_step):
        for name in FIGURES:
            value = figures.get(name)
            if value is None:
                continue
            others = [sibling[at].get(name) for sibling in siblings]
            apart = max((abs(other - value) for other in others if other is not None), default=0.0)
            least = EPSILONS * float(np.finfo(np.float32).eps) * abs(value)
            reached[name] = max(reached[name], apart, least)
        rows.append({name: MARGIN * distance for name, distance in reached.items()})
    return rows


def limits_apart(then: float | None, now: float | None, limit: float) -> float:
    """Returns the distance of two figures in limits, infinite if only one of them is a number."""
    if then is None or now is None or not limit:
        return 0.0 if then == now else math.inf
    return abs(now - then) / limit


def moved(state: TrainState, seed: int, compute: str = "float32") -> TrainState:
    """Returns the state with every weight moved by `ULPS` units in the last place, up or down.

    If a step computes in a narrower dtype, a weight moves by half of that dtype's epsilon: another
    layout rounds sums in that dtype, and smaller moves would hardly change them.
    """
    narrow = float(jnp.finfo(compute).eps) / 2
    keys = jax.random.split(jax.random.key(seed), max(len(state.params), 1))
    params = {
        path: _moved(x, key, max(ULPS * float(jnp.finfo(x.dtype).eps), narrow))
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x
        for (path, x), key in zip(sorted(state.params.items()), keys, strict=True)
    }
    return replace(state, params={path: params[path] for path in state.params})


def _moved(x: jax.Array, key: jax.Array, share: float) -> jax.Array:
    """Returns `x` with each element scaled up or down by this share; 0 stays 0."""

    def move(x: jax.Array, key: jax.Array) -> jax.Array:
        sign = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 1.0, -1.0)
        return (x.astype(jnp.float32) * (1 + share * sign)).astype(x.dtype)

    return jax.jit(move, out_shardings=x.sharding)(x, key)
