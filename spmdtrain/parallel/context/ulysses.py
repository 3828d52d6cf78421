"""Exchanges heads for tokens by an all-to-all before attention and one after:

Ulysses (arXiv:2309.14509). In between, a device has all tokens of its part of the heads, in order,
so any mask and any kernel will do. b: sequences, t: tokens, k: key-value heads, all of this device;
n: devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

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


def own_heads(x_k: jax.Array, axes: tuple[str, ...], ways: int) -> jax.Array:
    """Returns the part of x [k, ...] that belongs to the heads of this device."""
    count = x_k.shape[0] // ways
    return jax.lax.dynamic_slice_in_dim(x_k, jax.lax.axis_index(axes) * count, count)
