"""The exponential moving average of the weights, with `optimizer.ema`.

It begins as the weights are, and after each step it is moved by 1 - d of its distance to them, d
being the decay (arXiv:2411.18704, after Polyak and Juditsky 1992). Nothing corrects it for its
beginning, which counts d^n after n steps. It is float32 whatever the weights are: with 0.999 a
thousandth of a distance is less than a bfloat16 can be moved by.

Each element has its own, so that the average rests as its weight does, padding too, and an update
needs no communication.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from spmdtrain.config.errors import CheckpointError
from spmdtrain.train.item import Item, Start, Taken, as_parameters

Ema = dict[str, jax.Array]  # by dotted path of the parameters that are trained, as they rest


def begin(params: Mapping[str, jax.Array], trained: Iterable[str]) -> Ema:
    """The average before the first step that it counts; for tracing.

    A copy: a step that is given weights and average donates both.
    """
    return {path: jnp.copy(params[path]).astype(jnp.float32) for path in trained}


def update(ema: Ema, decay: float, params: Mapping[str, jax.Array]) -> Ema:
    """The average after a step that left these weights."""

    def moved(average: jax.Array, x: jax.Array) -> jax.Array:
        return average + (1 - decay) * (x.astype(jnp.float32) - average)

    return {path: moved(average, params[path]) for path, average in ema.items()}


def _begin(start: Start) -> Ema | None:
    return begin(start.params, start.trained) if start.config.optimizer.ema else None


def _update(ema: Ema, taken: Taken) -> Ema:
    decay = taken.config.optimizer.ema
    assert decay is not None, "a state has an average where the settings ask for one"
    return update(ema, decay, taken.params)


def none_saved(where: str) -> CheckpointError:
    """The error of whoever asks the checkpoint `where` for an average that it does not hold."""
    return CheckpointError(
        f"{where} holds no average of the weights",
        asked="ema",
        found="optimizer.ema=none while it was trained",
        fix="the weights as they are, or training with --set optimizer.ema=0.999",
    )


ITEM = Item("ema", begin=_begin, rests=as_parameters, update=_update, lacking=none_saved)
