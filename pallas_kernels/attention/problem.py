"""One attention call: its arrays, what is known before they are, who sees whom, and which tiles that leaves to compute.

Letters: b batch, t query time, s key time, h query heads, k key-value heads, g query heads per key-value head, d head
dim of queries and keys, e head dim of values.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_POSITIONS = 2**30  # positions are int32, so are their differences


@dataclass(frozen=True)
class Problem:
    """A query at position p sees keys at positions p - left to p + right, within its segment. None: no bound."""

    left: int | None
    right: int | None
    softcap: float | None
    scale: float


class Inputs(NamedTuple):
    """None where the call does not say. Without positions key j is at j and query i at i + s - t."""

    q_bthd: jax.Array
    k_bskd: jax.Array
    v_bske: jax.Array
    bias: jax.Array | None = None  # [b or 1, h or 1, t or 1, s or 1]
    segments: tuple[jax.Array, jax.Array] | None = None  # [b, t], [b, s]
    positions: tuple[jax.Array, jax.Array] | None = None  # [b, t], [b, s]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_bthd.shape[1], self.k_bskd.shape[1]

    @property
    def group(self) -> int:
        return self.q_bthd.shape[2] // self.k_bskd.shape[2]


def prepare(  # noqa: PLR0913 - the arguments of `attention`
    q, k, v, *, causal, segment_ids, window, softcap, scale, bias, positions
) -> tuple[Problem, Inputs]:
    """The call, checked: each mistake is a ValueError of one line."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"attention: {name} must be [batch, time, heads, head_dim], each at least 1, not {x.shape}"
            )
        if x.dtype != q.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
            raise ValueError(
                f"attention: {name} is {x.dtype}; q, k and v must share one floating dtype, q is {q.dtype}"
            )
    (b, t, h, d), (_, s, heads, _) = q.shape, k.shape
    if k.shape != (b, s, heads, d) or v.shape[:3] != (b, s, heads) or h % heads:
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape} do not fit: k and v share batch, time and heads, "
            "q and k head_dim, and the heads of q are a multiple of those of k"
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"attention: softcap={softcap} must be above 0 and finite; None: no cap")
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise ValueError(f"attention: window={window} must be (left, right), keys before and after the query")
    left, right = (None, None) if window is None else window
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"attention: window={window}: (left, right) count keys, at least 0; None: no bound")
    farthest = t + s if positions is None else MOST_POSITIONS
    left, right = (None if side is None or side >= farthest else int(side) for side in (left, right))
    if causal:
        right = 0
    if bias is not None:
        if bias.ndim != 4 or any(have not in (1, want) for have, want in zip(bias.shape, (b, h, t, s), strict=True)):
            raise ValueError(
                f"attention: bias {bias.shape} does not broadcast to [batch, heads, t, s] = {(b, h, t, s)}"
            )
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(f"attention: bias is {bias.dtype}, not floating: a mask is jnp.where(mask, 0, -jnp.inf)")
    segments = _pair("segment_ids", segment_ids, b, t, s)
    positions = _pair("positions", positions, b, t, s)
    problem = Problem(left, right, softcap, d**-0.5 if scale is None else float(scale))
    return problem, Inputs(q, k, v, bias, segments, positions)


def _pair(name: str, given, b: int, t: int, s: int) -> tuple[jax.Array, jax.Array] | None:
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    if [getattr(x, "shape", None) for x in pair] != [(b, t), (b, s)]:
        found = ", ".join(str(getattr(x, "shape", type(x).__name__)) for x in pair)
        raise ValueError(f"attention: {name} must be [batch, t], [batch, s] = {(b, t)}, {(b, s)}, not {found}")
    if any(not jnp.issubdtype(x.dtype, jnp.integer) for x in pair):
        raise ValueError(f"attention: {name} must be integers")
    return pair[0].astype(jnp.int32), pair[1].astype(jnp.int32)


def sees(problem: Problem, q_position, k_position, q_segment=None, k_segment=None):
    """Whether each query sees each key, broadcast; None: all do."""
    distance, seen = q_position - k_position, None
    if problem.right is not None:
        seen = distance >= -problem.right
    if problem.left is not None:
        near = distance <= problem.left
        seen = near if seen is None else seen & near
    if q_segment is not None:
        same = q_segment == k_segment
        seen = same if seen is None else seen & same
    return seen


def tiles(problem: Problem, inputs: Inputs, block_q: int, block_k: int):
    """(visible, full), [1 or b, query tiles, key tiles]: tiles that may hold a pair that sees, and that hold no other.

    numpy arrays where neither segments nor positions are given, which only the running program knows. Visible may be
    too generous (it compares ranges), full is exact or false.
    """
    t, s = inputs.lengths
    known = inputs.segments is None and inputs.positions is None
    xp = np if known else jnp
    q_position, k_position = inputs.positions or (xp.arange(t)[None] + s - t, xp.arange(s)[None])
    q_low, q_high = _ranges(xp, q_position, block_q)
    k_low, k_high = _ranges(xp, k_position, block_k)
    q_low, q_high = q_low[:, :, None], q_high[:, :, None]
    k_low, k_high = k_low[:, None], k_high[:, None]
    visible = xp.ones((1, q_low.shape[1], k_low.shape[2]), bool)
    full = visible & ((xp.arange(visible.shape[2]) + 1) * block_k <= s)
    if problem.right is not None:
        visible, full = visible & (k_low <= q_high + problem.right), full & (k_high <= q_low + problem.right)
    if problem.left is not None:
        visible, full = visible & (k_high >= q_low - problem.left), full & (k_low >= q_high - problem.left)
    if inputs.segments is not None:
        (q_first, q_last), (k_first, k_last) = (
            _ranges(xp, ids, block) for ids, block in zip(inputs.segments, (block_q, block_k), strict=True)
        )
        q_first, q_last = q_first[:, :, None], q_last[:, :, None]
        k_first, k_last = k_first[:, None], k_last[:, None]
        visible = visible & (q_first <= k_last) & (k_first <= q_last)
        full = full & (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
    return visible, full


def _ranges(xp, values, block: int):
    """Smallest and largest value in each block of the last dim, whose end is repeated up to a whole block."""
    length = values.shape[1]
    padded = xp.pad(values, ((0, 0), (0, -length % block)), mode="edge").reshape(values.shape[0], -1, block)
    return padded.min(-1), padded.max(-1)
