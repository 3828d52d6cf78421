"""Exchanges heads for tokens by an all-to-all before attention and one after:

Ulysses (arXiv:2309.14509). In between, a device has all tokens of its part of the heads, in order,
so any mask and any kernel will do. b: sequences, t: tokens, k: key-value heads, all of this device;
n: devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.parallel.reduce import gather_whole

Local = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def heads_for_time(
    attend: Local, axes: tuple[str, ...], q_btkgd: jax.Array, k_btkd: jax.Array, v_btke: jax.Array
) -> jax.Array:
    """Returns attention [b, t, k, g, e], computed by `attend` on [b, n t, k / n, ...]; `axes` are
    manual.

    `attend(q, k, v)` returns [b, n t, k / n, g, e]. k is divisible by n.
    """
    group = q_btkgd.shape[-2]
    if k_btkd.shape == v_btke.shape:  # one all-to-all for all three
        slots = jnp.concatenate((q_btkgd, k_btkd[..., None, :], v_btke[..., None, :]), -2)
        slots = _to_heads(slots, axes)
        y = attend(slots[..., :group, :], slots[..., group, :], slots[..., group + 1, :])
    else:
        y = attend(*(_to_heads(x, axes) for x in (q_btkgd, k_btkd, v_btke)))
    return jax.lax.all_to_all(y, axes, split_axis=1, concat_axis=2, tiled=True)


def _to_heads(x_btk: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_to_all(x_btk, axes, split_axis=2, concat_axis=1, tiled=True)


def own_heads(x_k: jax.Array, axes: tuple[str, ...], ways: int, dim: int = 0) -> jax.Array:
    """Returns the part of x [k, ...] that belongs to the heads of this device; `dim`: that of k."""
    count = x_k.shape[dim] // ways
    return jax.lax.dynamic_slice_in_dim(x_k, jax.lax.axis_index(axes) * count, count, dim)


def exchanging_heads(
    function: Callable[..., Any],
    axes: tuple[str, ...],
    ways: int,
    names: Sequence[Sequence[Any] | None],
    results: Sequence[Sequence[Any]],
    heads: str,
) -> Callable[..., Any]:
    """Returns `function` of all tokens and a part of the heads, for arrays of some tokens and all
    heads.

    `names`, `results`: the logical axes of its arrays and results; dims of tokens are "time", and
    dim 1; those of heads are `heads`. `axes` are manual, and have `ways` devices.
    """

    def exchanged(x: jax.Array | None, names_of_x: Any) -> jax.Array | None:
        if x is None or not {heads, "time"} & set(names_of_x):
            return x
        if heads not in names_of_x:
            return gather_whole(x, axes, 1)
        dim = list(names_of_x).index(heads)
        if "time" not in names_of_x:
            return own_heads(x, axes, ways, dim)
        return jax.lax.all_to_all(x, axes, split_axis=dim, concat_axis=1, tiled=True)

    def back(y: jax.Array, names_of_y: Sequence[Any]) -> jax.Array:
        dim = list(names_of_y).index(heads)
        return jax.lax.all_to_all(y, axes, split_axis=1, concat_axis=dim, tiled=True)

    def on_some_heads(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
        made = function(*map(exchanged, arrays, names))
        return tuple(map(back, made, results))

    return on_some_heads
