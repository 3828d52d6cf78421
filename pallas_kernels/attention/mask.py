"""Masks attention: pair by pair, and by whole tiles (the block mask).

A *pair* is a query and a key; it is *visible* if the query may attend to the key. A *tile* is a
block of queries by a block of keys. Letters as in problem.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.problem import Inputs, Problem


def positions(inputs: Inputs, xp=jnp):
    """Returns positions (of queries [b or 1, t], of keys [b or 1, s]).

    They are the given ones, or else counted from the ends.
    """
    if inputs.q_positions is not None and inputs.kv_positions is not None:
        return inputs.q_positions, inputs.kv_positions
    t, s = inputs.lengths
    return xp.arange(t)[None] + s - t, xp.arange(s)[None]


def pair_mask(problem: Problem, q_positions, kv_positions, q_segment_ids=None, kv_segment_ids=None):
    """Returns bool, the arguments broadcast together: which pairs are visible; None: all."""
    distance = q_positions - kv_positions  # how far back the key is; negative: later
    mask = None
    if problem.right is not None:
        mask = distance >= -problem.right
    if problem.left is not None:
        near = distance <= problem.left
        mask = near if mask is None else mask & near
    if q_segment_ids is not None:
        same = q_segment_ids == kv_segment_ids
        mask = same if mask is None else mask & same
    return mask


def dense_mask(problem: Problem, inputs: Inputs):
    """Returns bool [b or 1, t, s]: which pairs are visible, ignoring the bias; None: all."""
    q_positions, kv_positions = positions(inputs)
    q_segment_ids = kv_segment_ids = None
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        q_segment_ids = inputs.q_segment_ids[:, :, None]
        kv_segment_ids = inputs.kv_segment_ids[:, None]
    return pair_mask(
        problem,
        q_positions[:, :, None],
        kv_positions[:, None],
        q_segment_ids,
        kv_segment_ids,
    )


def visible_keys(problem: Problem, inputs: Inputs):
    """Returns bool [b or 1, s]: which keys are visible to some query; None: all.

    Hidden keys may hold NaN. With segments or positions this compares all pairs, t x s, unless XLA
    can prove the first half of the last line, as it can if both sides have the same ids.
    """
    t, s = inputs.lengths
    if inputs.mask_is_static:
        first = 0 if problem.left is None else max(s - t - problem.left, 0)
        return jnp.arange(s)[None] >= first if first else None
    mask = dense_mask(problem, inputs)
    if mask is None:
        return None
    if t == s and not inputs.has_positions:
        return mask.any(1) | (inputs.q_segment_ids == inputs.kv_segment_ids)
    return mask.any(1)


def zero_hidden(x: jax.Array, visible) -> jax.Array:
    """Returns x [b, time, ...] where `visible` [b or 1, time], else 0; x itself if that is None.

    Hidden rows may hold NaN, and NaN x 0 = NaN would reach visible ones through a matmul.
    """
    if visible is None:
        return x
    return jnp.where(visible.reshape(*visible.shape, *[1] * (x.ndim - 2)), x, 0)


def block_mask(problem: Problem, inputs: Inputs, block_q: int, block_k: int):
    """Returns the block mask (visible, full), bool [b or 1, query tiles, key tiles], without bias.

    `visible`: the tile may hold a visible pair. It compares ranges of positions and ids, so it can
    be true for a tile that holds none. `full`: every pair is visible, so the tile needs no mask.
    They are numpy arrays if the mask is static, so that a scan's length can depend on them.
    """
    xp: Any = np if inputs.mask_is_static else jnp
    _, s = inputs.lengths
    q_positions, kv_positions = positions(inputs, xp)
    q_low, q_high = _block_ranges(xp, q_positions, block_q)
    k_low, k_high = _block_ranges(xp, kv_positions, block_k)
    q_low = q_low[:, :, None]  # [., query tiles, 1]
    q_high = q_high[:, :, None]
    k_low = k_low[:, None]  # [., 1, key tiles]
    k_high = k_high[:, None]
    visible = xp.ones((1, q_low.shape[1], k_low.shape[2]), bool)
    # A tile that reaches beyond the last key is not full: its padding must be masked.
    full = visible & ((xp.arange(visible.shape[2]) + 1) * block_k <= s)
    if problem.right is not None:
        visible = visible & (k_low <= q_high + problem.right)
        full = full & (k_high <= q_low + problem.right)
    if problem.left is not None:
        visible = visible & (k_high >= q_low - problem.left)
        full = full & (k_low >= q_high - problem.left)
    if inputs.has_segments:
        # Ranges of ids that do not overlap share no segment; overlapping ranges may.
        q_low, q_high = _block_ranges(xp, inputs.q_segment_ids, block_q)
        k_low, k_high = _block_ranges(xp, inputs.kv_segment_ids, block_k)
        q_low = q_low[:, :, None]
        q_high = q_high[:, :, None]
        k_low = k_low[:, None]
        k_high = k_high[:, None]
        visible = visible & (q_low <= k_high) & (k_low <= q_high)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    return visible, full


def _block_ranges(xp, values, block: int):
    """Returns (smallest, largest) value of each block along time, of `values` [b or 1, time].

    The last value is repeated up to a whole block, which changes neither.
    """
    rows, length = values.shape
    padded = xp.pad(values, ((0, 0), (0, -length % block)), mode="edge")
    blocks = padded.reshape(rows, -1, block)
    return blocks.min(-1), blocks.max(-1)
