"""The exponential moving average of the weights, with `optimizer.ema`.

It starts at the weights, and each step moves it (1 - d) of the way to them, d being the decay
(arXiv:2411.18704, after Polyak and Juditsky 1992). There is no bias correction: after n steps the
start still has weight d^n. It is float32 whatever the weights are: with 0.999 it moves by a
thousandth of the distance, less than a bfloat16 can resolve.

An element that an item of the state holds at zero has no average: it is zero too.

Each element has its own average, so an average is sharded like its weight, including padding, and
an update needs no communication.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import CheckpointError
from spmdtrain.train.items.item import Item, Start, Taken, as_parameters
from spmdtrain.train.part import Part

Ema = dict[str, jax.Array]  # by dotted path of the parameters that are trained, as they rest


def begin(params: Mapping[str, jax.Array], trained: Iterable[str]) -> Ema:
    """Returns the initial average; for tracing.

    It is a copy, because a step that gets weights and average donates both.
    """
    return {path: jnp.copy(params[path]).astype(jnp.float32) for path in trained}


def update(ema: Ema, decay: float, params: Mapping[str, jax.Array]) -> Ema:
    """Returns the average after a step that left these weights."""

    def moved(average: jax.Array, x: jax.Array) -> jax.Array:
        return average + (1 - decay) * (x.astype(jnp.float32) - average)

    return {path: moved(average, params[path]) for path, average in ema.items()}


def _begin(start: Start) -> Ema | None:
    return begin(start.params, start.learned) if start.config.optimizer.ema else None


def _update(ema: Ema, taken: Taken) -> Ema:
    decay = taken.config.optimizer.ema
    assert decay is not None, "a state has an average where the settings ask for one"
    return taken.with_zeros(update(ema, decay, taken.params))


def none_saved(where: str) -> CheckpointError:
    """Returns the error for reading an average from a checkpoint `where` that has none."""
    return CheckpointError(
        f"{where} holds no average of the weights",
        asked="ema",
        found="optimizer.ema=none while it was trained",
        fix="the weights as they are, or training with --set optimizer.ema=0.999",
    )


ITEM = Item("ema", begin=_begin, rests=as_parameters, update=_update, lacking=none_saved)
EMA = Part("ema", items=(ITEM,))
