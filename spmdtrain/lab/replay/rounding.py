"""Measures how far rounding alone moves the figures of a replay, by siblings.

A sibling begins with every weight moved by two units in the last place, up or down at random. It is
the same run except for rounding, as is a run on another mesh, so the distance between siblings is
the scale on which another mesh is judged. A constant would not do: how far rounding grows depends
on the model and on the number of steps.
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
ULPS = 2  # by which a sibling moves each weight
MARGIN = 8.0  # multiple of the distance of the siblings: correct layouts stay below 2
EPSILONS = 4.0  # share of a figure below which float32 cannot tell two values apart
FIGURES = ("loss", "grad_norm")


def figures_again(
    opened: Opened, last: int, state: TrainState | None = None
) -> list[dict[str, Any]]:
    """Returns the figures of the steps after `opened.start`, up to `last`."""
    return [again.figures for again in steps_again(opened, last, state=state)]


def limits(opened: Opened, last: int, found: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns the limits of a replay, whose figures are `found`, by siblings that start as it
    does.
    """
    compute = opened.setup.config.precision.compute
    siblings = [
        figures_again(opened, last, moved(opened.begin(), n, compute)) for n in range(SIBLINGS)
    ]
    return limits_among(found, siblings)


def limits_among(
    found: Sequence[Mapping[str, Any]], siblings: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, float]]:
    """Returns, for each step, how far rounding alone may move each of `FIGURES`.

    `found` has the figures of each step, `siblings` those of each sibling. A limit never falls from
    one step to the next.
    """
    reached = dict.fromkeys(FIGURES, 0.0)
    rows = []
    for at, figures in enumerate(found):
        for name in FIGURES:
            value = figures.get(name)
            if value is None:
                continue
            others = [each[at].get(name) for each in siblings]
            apart = max((abs(each - value) for each in others if each is not None), default=0.0)
            least = EPSILONS * float(np.finfo(np.float32).eps) * abs(value)
            reached[name] = max(reached[name], apart, least)
        rows.append({name: MARGIN * each for name, each in reached.items()})
    return rows


def limits_apart(then: float | None, now: float | None, limit: float) -> float:
    """Returns how many limits apart two figures are; infinite if only one of them is a number."""
    if then is None or now is None or not limit:
        return 0.0 if then == now else math.inf
    return abs(now - then) / limit


def moved(state: TrainState, seed: int, compute: str = "float32") -> TrainState:
    """Returns the state with every weight moved by `ULPS` units in the last place, up or down.

    If a step computes in a narrower dtype, each is moved by half of that dtype's epsilon: another
    layout rounds sums in it, and smaller moves would hardly ever change those.
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
    """Returns `x` with each element moved up or down by this share of it; 0 stays 0."""

    def move(x: jax.Array, key: jax.Array) -> jax.Array:
        sign = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 1.0, -1.0)
        return (x.astype(jnp.float32) * (1 + share * sign)).astype(x.dtype)

    return jax.jit(move, out_shardings=x.sharding)(x, key)
