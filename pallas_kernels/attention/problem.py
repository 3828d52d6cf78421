"""Checks an attention call: its static part (`Problem`) and its arrays (`Inputs`).

Letters of dims, in names such as `q_bthd`, throughout this package:

    b  batch                t  query time             s  key time
    h  query heads          k  key-value heads        g  query heads per key-value head
    d  head dim of queries and keys                   e  head dim of values
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import as_number, as_whole, check_flag, check_ids
from pallas_kernels.calls import AttentionCall

MOST_POSITIONS = 2**30  # positions are int32, and so are differences of two


@dataclass(frozen=True)
class Problem:
    """The static part of a call, known when it is traced.

    A query at position p attends to keys of its segment at positions p - left to p + right; None
    means no bound on that side. Causal attention has right = 0.
    """

    left: int | None
    right: int | None
    softcap: float | None
    scale: float

    @property
    def has_window(self) -> bool:
        """True if positions hide anything: the call is causal or has a window."""
        return self.left is not None or self.right is not None

    def scores(
        self, products: jax.Array, base: float, tanh: Callable = jnp.tanh
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns scores, multiplied by `base`, from q k^T, and the softcap's derivative.

        Gradients of scores are multiplied by this derivative; it is None without a softcap. A
        `base` of log2(e) lets a kernel take exp2 instead of exp.
        """
        if self.softcap is None:
            return products * (self.scale * base), None
        capped = tanh(products * (self.scale / self.softcap))
        return capped * (self.softcap * base), 1 - capped * capped


class Inputs(NamedTuple):
    """The arrays of a call. Segment ids exist for both sides or for neither; so do positions.

    Without positions key j is at j and query i at i + s - t: both sequences end together.
    """

    q_bthd: jax.Array
    k_bskd: jax.Array
    v_bske: jax.Array
    bias: jax.Array | None = None  # [b or 1, h or 1, t or 1, s or 1]
    q_segment_ids: jax.Array | None = None  # int32 [b, t]
    kv_segment_ids: jax.Array | None = None  # int32 [b, s]
    q_positions: jax.Array | None = None  # int32 [b, t]
    kv_positions: jax.Array | None = None  # int32 [b, s]

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths (t, s)."""
        return self.q_bthd.shape[1], self.k_bskd.shape[1]

    @property
    def group(self) -> int:
        """The number of query heads that share one key-value head."""
        return self.q_bthd.shape[2] // self.k_bskd.shape[2]

    @property
    def has_segments(self) -> bool:
        return self.q_segment_ids is not None

    @property
    def has_positions(self) -> bool:
        return self.q_positions is not None

    @property
    def mask_is_static(self) -> bool:
        """True if tracing knows which query attends to which key (ignoring the bias)."""
        return not self.has_segments and not self.has_positions


def call_of(problem: Problem, inputs: Inputs, return_lse: bool) -> AttentionCall:
    """Returns the class of the call, which suffices to draw another one."""
    batch, queries, heads, head_dim = inputs.q_bthd.shape
    _, keys, kv_heads, value_dim = inputs.v_bske.shape
    return AttentionCall(
        dtype=str(inputs.q_bthd.dtype),
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        left=problem.left,
        right=problem.right,
        softcap=problem.softcap,
        scale=problem.scale,
        segments=inputs.has_segments,
        positions=inputs.has_positions,
        bias=inputs.bias is not None,
        lse=return_lse,
    )


def prepare(  # noqa: PLR0913 - the arguments of `attention`
    q, k, v, *, causal, segment_ids, window, softcap, scale, bias, positions
) -> tuple[Problem, Inputs]:
    """Returns the checked call: each mistake is a ValueError of one line."""
    _check_qkv(q, k, v)
    check_flag("attention", "causal", causal)
    if scale is not None:
        scale = as_number("attention", "scale", scale)
    b, t, h, d = q.shape
    s = k.shape[1]
    if softcap is not None:
        softcap = as_number("attention", "softcap", softcap, 0)
        if not softcap:
            raise ValueError("attention: softcap=0 must be above 0; None: no cap")
    farthest = t + s if positions is None else MOST_POSITIONS
    left, right = _check_window(window, farthest)
    if causal:
        right = 0
    _check_bias(bias, (b, h, t, s))
    q_segment_ids, kv_segment_ids = _check_pair("segment_ids", segment_ids, b, t, s)
    q_positions, kv_positions = _check_pair("positions", positions, b, t, s)
    problem = Problem(left, right, softcap, d**-0.5 if scale is None else scale)
    inputs = Inputs(
        q,
        k,
        v,
        bias,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_positions=q_positions,
        kv_positions=kv_positions,
    )
    return problem, inputs


def _check_qkv(q, k, v) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            raise ValueError(f"attention: {name} is an array, not None")
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"attention: {name} must be [batch, time, heads, head_dim], each at least 1, "
                f"not {x.shape}"
            )
        floating = x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
        if x.dtype != q.dtype or not floating:
            raise ValueError(
                f"attention: {name} is {x.dtype}; q, k and v must share one floating dtype, "
                f"q is {q.dtype}"
            )
    b, _, h, d = q.shape
    _, s, kv_heads, _ = k.shape
    if k.shape != (b, s, kv_heads, d) or v.shape[:3] != (b, s, kv_heads) or h % kv_heads:
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape} do not fit: k and v share batch, "
            "time and heads, q and k head_dim, and the heads of q are a multiple of those of k"
        )


def _check_window(window, farthest: int) -> tuple[int | None, int | None]:
    """Returns (left, right); a side of at least `farthest` positions is no bound."""
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            f"attention: window={window} must be (left, right), keys before and after the query"
        )
    sides = [
        None if side is None else as_whole("attention", "a side of window", side, 0, 2**62)
        for side in window
    ]
    left, right = (None if side is None or side >= farthest else side for side in sides)
    return left, right


def _check_bias(bias, whole: tuple[int, int, int, int]) -> None:
    if bias is None:
        return
    if bias.ndim != 4 or any(
        have not in (1, want) for have, want in zip(bias.shape, whole, strict=True)
    ):
        raise ValueError(
            f"attention: bias {bias.shape} does not broadcast to [batch, heads, t, s] = {whole}"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"attention: bias is {bias.dtype}, not floating: a mask is jnp.where(mask, 0, -jnp.inf)"
        )


def _check_pair(name: str, given, b: int, t: int, s: int):
    """Returns (for queries, for keys) as int32: one array for both if `given` is not a pair."""
    if given is None:
        return None, None
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    if [getattr(x, "shape", None) for x in pair] != [(b, t), (b, s)]:
        found = ", ".join(str(getattr(x, "shape", type(x).__name__)) for x in pair)
        raise ValueError(
            f"attention: {name} must be [batch, t], [batch, s] = {(b, t)}, {(b, s)}, not {found}"
        )
    for x in pair:
        check_ids("attention", name, x)
    for_queries, for_keys = pair
    return for_queries.astype(jnp.int32), for_keys.astype(jnp.int32)
