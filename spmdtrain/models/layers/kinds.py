"""Lets the layers of a scanned stack differ, by their number.

All layers share one program, which a scan runs. Differences are a table with a row for each kind,
or a branch; weights have the same shapes in all layers.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.counting import is_counted, share_counted
from spmdtrain.config.errors import ConfigError

Kind = TypeVar("Kind", bound=Hashable)


def by_kind(
    of_layers: Sequence[Kind], number: jax.Array | int | None, function: Callable[[Kind], jax.Array]
) -> jax.Array:
    """Returns `function(kind)` for the kind that layer `number` has in `of_layers`.

    Every distinct kind is a branch of the program, unless there is only one. When FLOPs are
    counted, each branch counts by its share of the layers.
    """
    kinds = list(dict.fromkeys(of_layers))
    if len(kinds) == 1:
        return function(kinds[0])
    if is_counted():
        results = []
        for kind in kinds:
            with share_counted(of_layers.count(kind) / len(of_layers)):
                results.append(function(kind))
        return sum(results[1:], results[0])
    if isinstance(number, int):
        return function(of_layers[number])
    return jax.lax.switch(kind_of(of_layers, number), [partial(function, kind) for kind in kinds])


def kind_of(of_layers: Sequence[Hashable], number: jax.Array | int | None) -> jax.Array:
    """Returns the index of a layer's kind among the distinct ones, in order of appearance.

    Raises ConfigError if the layer has no number: it was called outside of a Stack.
    """
    if number is None:
        raise ConfigError(
            "a layer that differs from others by its number is called without one",
            fix="a Stack, which numbers its layers, or ctx.at_layer(number)",
        )
    kinds = list(dict.fromkeys(of_layers))
    table = jnp.array([kinds.index(kind) for kind in of_layers], jnp.int32)
    return table[number]
