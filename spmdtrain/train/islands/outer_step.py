"""Keeps the outer weights and their momentum, which islands have in common, as items of the state.

A third item is the step of the meeting that a signal has cut short, otherwise 0: the island has
left its change, and takes the result when it goes on.

Between two meetings an island moves away from the outer weights. Its change is d_i = outer - x_i, a
gradient of sorts, with the outer weights in the dtype of x_i. The mean change of the islands d
moves the outer weights (DiLoCo, arXiv:2311.08105):

    nesterov:  m = momentum * m + d,  outer = outer - rate * (momentum * m + d)
    average:   outer = outer - d

An island that is present is weighted by its sequences in a step. Both items are float32 and sharded
like their parameters, so the outer step moves nothing between devices. A training step does not
change them.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spmdtrain.config.schema import IslandsConfig
from spmdtrain.train.items.item import Item, Note, Start, Taken, Value, as_parameters, whole
from spmdtrain.train.part import Part

Weights = dict[str, jax.Array]  # by dotted path of the parameters that are trained, as they rest


def outer_step(
    settings: IslandsConfig, in_step: bool, outer: Weights, momentum: Weights, d: Weights
) -> tuple[Weights, Weights]:
    """Returns (outer weights, momentum) after a meeting with the mean change d; for tracing.

    `in_step`: the meeting is one of the first, which average and leave the momentum as it is.
    Paths without a change stay.
    """
    if in_step or settings.outer == "average":
        return outer | {path: outer[path] - d[path] for path in d}, momentum
    mu, rate = settings.momentum, settings.rate
    moved = {path: mu * momentum[path] + d[path] for path in d}
    after = {path: outer[path] - rate * (mu * moved[path] + d[path]) for path in d}
    return outer | after, momentum | moved


def _begin_outer(start: Start) -> Weights | None:
    if not start.config.islands.are_several:
        return None
    return _copies(start.params, start)


def _begin_momentum(start: Start) -> Weights | None:
    islands = start.config.islands
    if not islands.are_several or islands.outer == "average":
        return None
    return {path: jnp.zeros(start.params[path].shape, jnp.float32) for path in start.learned}


def _begin_unmet(start: Start) -> jax.Array | None:
    return jnp.int32(0) if start.config.islands.are_several else None


def _copies(params: Mapping[str, jax.Array], start: Start) -> Weights:
    """Returns float32 copies: a step donates the weights and what follows them apart."""
    return {path: jnp.copy(params[path]).astype(jnp.float32) for path in start.learned}


def _unchanged(value: Value, taken: Taken) -> Value:  # noqa: ARG001
    return value


OUTER = Item("outer", begin=_begin_outer, rests=as_parameters, update=_unchanged)
MOMENTUM = Item("outer_momentum", begin=_begin_momentum, rests=as_parameters, update=_unchanged)
UNMET = Item(
    "unmet",
    begin=_begin_unmet,
    rests=whole,
    update=_unchanged,
    note=Note(int, lambda number, _: number),
)
OUTER_STEP = Part("islands", items=(OUTER, MOMENTUM, UNMET))
