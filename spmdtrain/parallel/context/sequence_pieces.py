"""Lets a function that needs the tokens in their order run where mesh axes split a sequence.

A device has contiguous *pieces* of the sequence, numbered in its order: one, or in a ring's order
two. To the function each piece is a row of the batch. What lies in front of a piece comes from
other devices, as far as the function asks for it. With Ulysses there is one piece: the device has
exchanged some heads of all tokens for all heads of some.

b: sequences, t: tokens of a piece, p: pieces of a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.parallel.context.context_method import ContextMethod, zigzag_order
from spmdtrain.parallel.context.ulysses import exchanging_heads
from spmdtrain.parallel.reduce import gather_whole


@dataclass(frozen=True)
class Pieces:
    """The pieces of a sequence on the devices along `axes`. The default: one piece, the whole."""

    axes: tuple[str, ...] = ()  # mesh axes, major first; manual
    ways: int = 1  # devices along them
    of_device: int = 1

    @property
    def count(self) -> int:
        """The number of all pieces."""
        return self.ways * self.of_device

    def split(self, x: jax.Array) -> jax.Array:
        """Returns the tokens of this device [b, p t, ...] by piece: [p b, t, ...]."""
        if self.of_device == 1:
            return x
        batch, tokens, *rest = x.shape
        cut = x.reshape(batch, self.of_device, tokens // self.of_device, *rest)
        return _as_rows(jnp.moveaxis(cut, 1, 0))

    def join(self, x: jax.Array) -> jax.Array:
        """Returns the pieces of this device [p b, t, ...] as its tokens: [b, p t, ...]."""
        if self.of_device == 1:
            return x
        rows, tokens, *rest = x.shape
        cut = x.reshape(self.of_device, rows // self.of_device, tokens, *rest)
        return jnp.moveaxis(cut, 0, 1).reshape(-1, self.of_device * tokens, *rest)

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns what all pieces have, in their order, [pieces, b, ...], from x [p b, ...]."""
        x = x.reshape(self.of_device, x.shape[0] // self.of_device, *x.shape[1:])
        if self.ways == 1:
            return x
        of_devices = gather_whole(x[None], self.axes, 0)  # [device, p, b, ...]
        if self.of_device == 1:
            return of_devices[:, 0]
        return jnp.concatenate((of_devices[:, 0], of_devices[::-1, 1]))

    def own(self, x: jax.Array) -> jax.Array:
        """Returns what belongs to the pieces of this device, [p b, ...], of x [pieces, b, ...]."""
        if self.ways == 1:
            return _as_rows(x)
        rank = jax.lax.axis_index(self.axes)
        numbers = [rank, self.count - 1 - rank][: self.of_device]
        return _as_rows(x[jnp.stack(numbers)])

    def in_order(self, x: jax.Array) -> jax.Array:
        """Returns whole sequences [b, tokens, ...] in order, from the order that devices have."""
        if self.of_device == 1:
            return x
        return x[:, np.argsort(zigzag_order(x.shape[1], self.ways))]

    def in_front(self, x: jax.Array, reach: int) -> jax.Array:
        """Returns the `reach` tokens in front of each piece [p b, reach, ...], of x [p b, t, ...].

        In front of the first piece are zeros.
        """
        if self.count == 1 or reach == 0:
            return jnp.zeros((x.shape[0], reach, *x.shape[2:]), x.dtype)
        last = min(reach, x.shape[1])
        ends = jnp.moveaxis(self.gather(x[:, x.shape[1] - last :]), 0, 1)
        ends = ends.reshape(ends.shape[0], -1, *x.shape[2:])  # [b, pieces last, ...]
        padded = jnp.pad(ends, ((0, 0), (reach, 0), *[(0, 0)] * (x.ndim - 2)))
        places = last * np.arange(self.count)[:, None] + np.arange(reach)
        return self.own(jnp.moveaxis(padded[:, places], 1, 0))


def _as_rows(x: jax.Array) -> jax.Array:
    """Returns x [p, b, ...] as [p b, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def on_pieces(
    method: ContextMethod | None,
    function: Callable[..., Any],
    names: Sequence[Sequence[Any] | None],
    results: Sequence[Sequence[Any]],
    heads: str = "kv_heads",
) -> Callable[..., Any]:
    """Returns a function of a device's own arrays, for `local_map`, that calls `function(pieces,
    *arrays)`.

    `method`: None if each device has whole sequences. `names`, `results`: the logical axes of its
    arrays and results; "time" is their dim 1. `heads`: the logical axis of the dim along which
    `function` treats everything apart.
    """
    whole = partial(function, Pieces())
    if method is None:
        return whole
    if method.name == "ulysses":
        return exchanging_heads(whole, method.axes, method.ways, names, results, heads)
    of_device = 2 if method.zigzag > 1 else 1
    return partial(function, Pieces(method.axes, method.ways, of_device))
