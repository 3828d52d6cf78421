"""Ring attention in zigzag order (arXiv:2310.01889): causal, and the same work on every device.

n devices cut the time into 2 n chunks, and device r has the chunks r and 2 n - 1 - r, the *earlier*
and the *later* half of its tokens. Keys and values go round: after i hops a device has those of
device j = r - i (mod n), and no hop needs a causal mask.

    i = 0   attention to the own tokens: they ascend, so it is plain causal
    j < r   both halves of the queries see the earlier half of the keys, all of it, and nothing else
    j > r   the later half of the queries sees all keys, and the earlier half none

So in every hop the later half of the queries sees the earlier half of the keys, and one more pair
of halves matches: earlier and earlier, or later and later. Both pairs are one call, stacked as a
batch, and `where` selects the second: shapes are the same everywhere, and no device takes a branch
by its rank, which collectives forbid.

With a window the masks are those of positions, and keys go only as far as some query sees: some
hops one way, as many the other way. Packed documents mask by the segment ids of both sides.

Softmax is joined by its lse. The backward pass is a second ring, with the out and lse of all keys.
The gradients of keys follow them, in float32, and come home in the end. A hop is the body of a
scan: program and memory do not grow with n.

b: sequences, t: tokens of a device, h: query heads, k: key-value heads, d, e: head dims.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import SAVED, attention_backward, attention_forward

Attended = tuple[jax.Array, jax.Array]  # (out [b, t, h, e], lse [b, t, h])


@dataclass(frozen=True)
class ContextRing:
    """The static part of a call: which devices, and how a query sees keys.

    windows: one for each kind of layer, the number of tokens before a query's own that it sees;
      None: all.
    """

    axes: tuple[str, ...]  # mesh axes, major first
    ways: int  # devices along them
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    scale: float | None = None
    implementation: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of every call of a kernel."""
        names = ("softcap", "scale", "implementation")
        return {name: getattr(self, name) for name in names}


class Sides(NamedTuple):
    """What masks a hop."""

    kind: jax.Array | None  # the index of the layer's window; None: there is one window
    segment_ids_nbt: jax.Array | None  # of all devices


class OfQueries(NamedTuple):
    """What the backward pass reads of each query; out and lse are those of all keys."""

    q_bthd: jax.Array
    out_bthe: jax.Array
    lse_bth: jax.Array
    dout_bthe: jax.Array
    dlse_bth: jax.Array


KeyValues = tuple[jax.Array, jax.Array]  # [b, t, k, d] and [b, t, k, e]


def legs(ring: ContextRing, tokens: int) -> list[tuple[int, int]]:
    """Returns the ways that keys go: (step of a hop, number of hops) for `tokens` of a device.

    Chunks that are at most m apart are on devices that are at most m hops apart.
    """
    n = ring.ways
    farthest = n
    if None not in ring.windows:
        chunk = tokens // 2
        most = max(window for window in ring.windows if window is not None)
        farthest = (most - 1) // chunk + 1 if most else 0
    if 2 * farthest >= n - 1:
        return [(1, n - 1)]
    return [(1, farthest), (-1, farthest)] if farthest else []


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    ring: ContextRing,
    q_bthd: jax.Array,
    k_btkd: jax.Array,
    v_btke: jax.Array,
    segment_ids_bt: jax.Array | None = None,
    kind: jax.Array | None = None,
) -> Attended:
    """Returns (out [b, t, h, e], lse [b, t, h] in float32) of causal attention to all tokens.

    All arrays are this device's, in zigzag order, in a region that is manual over the ring's axes.
    `kind`: the index of the layer's window; a ring with one window needs none.
    """
    return _ring_forward(ring, q_bthd, k_btkd, v_btke, segment_ids_bt, kind)[0]


def _ring_forward(ring, q, k, v, segment_ids, kind):
    sides = Sides(kind, _gathered(ring, segment_ids))
    out, lse = _own_forward(ring, sides, q, (k, v))
    state = (_wide(out), lse)
    for leg in legs(ring, q.shape[1]):
        state = _leg_forward(ring, sides, leg, (q, (k, v)), state)
    out = checkpoint_name(state[0].astype(q.dtype), SAVED)
    lse = checkpoint_name(state[1], SAVED)
    return (out, lse), (q, k, v, segment_ids, kind, out, lse)


def _leg_forward(ring, sides, leg, arrays, state):
    """Returns (out, lse) with the keys of `leg` joined in. The next keys move beside a kernel."""
    step, count = leg
    q, kv = arrays

    def body(carry, i):
        kv, state = carry
        following = _shift(ring, step, kv)
        return (following, _hop_forward(ring, sides, step * i, (q, kv), state)), None

    start = (_shift(ring, step, kv), state)
    (kv, state), _ = jax.lax.scan(body, start, jnp.arange(1, count))
    return _hop_forward(ring, sides, step * count, (q, kv), state)


def _ring_backward(ring, kept, gradients):
    q, k, v, segment_ids, kind, out, lse = kept
    dout, dlse = gradients
    queries = OfQueries(q, out, lse, dout, jnp.where(jnp.isneginf(lse), 0, dlse))
    sides = Sides(kind, _gathered(ring, segment_ids))
    dq, dk, dv = map(_wide, _own_backward(ring, sides, queries, (k, v)))
    for leg in legs(ring, q.shape[1]):
        dq, more_k, more_v = _leg_backward(ring, sides, leg, (queries, (k, v)), dq)
        dk = dk + more_k
        dv = dv + more_v
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


def _leg_backward(ring, sides, leg, arrays, dq):
    """Returns (dq with the part of this leg, dk and dv of this leg).

    The sums dk and dv move one hop after their keys, so that they too move beside a kernel.
    """
    step, count = leg
    queries, kv = arrays

    def hop(i, kv):
        return tuple(map(_wide, _hop_backward(ring, sides, step * i, queries, kv)))

    def body(carry, i):
        kv, dq, dkv = carry
        following = _shift(ring, step, kv)
        dkv = _shift(ring, step, dkv)
        more, *more_kv = hop(i, kv)
        return (following, dq + more, tuple(map(jnp.add, dkv, more_kv))), None

    first = _shift(ring, step, kv)
    following = _shift(ring, step, first) if count > 1 else first
    more, *dkv = hop(1, first)
    start = (following, dq + more, tuple(dkv))
    (_, dq, dkv), _ = jax.lax.scan(body, start, jnp.arange(2, count + 1))
    return dq, *_shift(ring, -step * count, dkv)  # home


ring_attention.defvjp(_ring_forward, _ring_backward)


# One call of a kernel: for the own keys, or for those of one hop.


def _own_forward(ring: ContextRing, sides: Sides, q, kv: KeyValues) -> Attended:
    def attend(window: int | None) -> Attended:
        return attention_forward(q, *kv, **_own_masks(ring, sides, q, window), **ring.options)

    return _by_window(ring, sides, attend)


def _own_backward(ring: ContextRing, sides: Sides, queries: OfQueries, kv: KeyValues):
    def gradients(window: int | None):
        masks = _own_masks(ring, sides, queries.q_bthd, window)
        return _backward(ring, queries, kv, masks)

    return _by_window(ring, sides, gradients)


def _own_masks(ring: ContextRing, sides: Sides, q, window: int | None) -> dict[str, Any]:
    if window is not None:
        return _masks_by_position(ring, sides, 0, q, window)
    own, _ = _segments(ring, sides, 0)
    return {"causal": True, "segment_ids": own}


def _hop_forward(ring: ContextRing, sides: Sides, i, arrays, state: Attended) -> Attended:
    """Returns `state` with the keys joined in that have come `i` hops."""
    q, kv = arrays

    def attend(window: int | None) -> Attended:
        if window is not None:
            masks = _masks_by_position(ring, sides, i, q, window)
            return join(*state, *attention_forward(q, *kv, **masks, **ring.options))
        halves = _Halves(_is_earlier(ring, i))
        found = attention_forward(
            halves.stack_queries(q),
            *map(halves.stack_keys, kv),
            segment_ids=_stacked_segments(ring, sides, i, halves),
            **ring.options,
        )
        return halves.join(state, found)

    return _by_window(ring, sides, attend)


def _hop_backward(ring: ContextRing, sides: Sides, i, queries: OfQueries, kv: KeyValues):
    """Returns (dq, dk, dv) of the keys that have come `i` hops."""

    def gradients(window: int | None):
        if window is not None:
            masks = _masks_by_position(ring, sides, i, queries.q_bthd, window)
            return _backward(ring, queries, kv, masks)
        halves = _Halves(_is_earlier(ring, i))
        segments = _stacked_segments(ring, sides, i, halves)
        stacked = OfQueries(*map(halves.stack_queries, queries))
        stacked_kv = tuple(map(halves.stack_keys, kv))
        dq, *dkv = _backward(ring, stacked, stacked_kv, {"segment_ids": segments})
        return halves.unstack_queries(_wide(dq)), *(halves.unstack_keys(_wide(x)) for x in dkv)

    return _by_window(ring, sides, gradients)


def _backward(ring: ContextRing, queries: OfQueries, kv: KeyValues, masks: dict[str, Any]):
    q, out, lse, dout, dlse = queries
    return attention_backward((q, *kv), (out, lse), (dout, dlse), **masks, **ring.options)


def _by_window(ring: ContextRing, sides: Sides, function: Callable[[int | None], Any]) -> Any:
    """Returns `function` of the layer's window: a branch by its kind, which has no collective."""
    if len(ring.windows) == 1:
        return function(ring.windows[0])
    assert sides.kind is not None, "layers with several windows have a kind"
    return jax.lax.switch(sides.kind, [partial(function, window) for window in ring.windows])


# Masks.


def _gathered(ring: ContextRing, segment_ids_bt: jax.Array | None) -> jax.Array | None:
    """Returns the segment ids of all devices [n, b, t]: 4 bytes a token, once a layer."""
    if segment_ids_bt is None:
        return None
    return jax.lax.all_gather(segment_ids_bt, ring.axes)


def _source(ring: ContextRing, i) -> jax.Array:
    """Returns the device whose keys have come `i` hops to this one."""
    return (jax.lax.axis_index(ring.axes) - i) % ring.ways


def _is_earlier(ring: ContextRing, i) -> jax.Array:
    return _source(ring, i) < jax.lax.axis_index(ring.axes)


def _segments(ring: ContextRing, sides: Sides, i) -> tuple[Any, Any]:
    """Returns the segment ids (of the queries, of the keys that have come `i` hops) or Nones."""
    if sides.segment_ids_nbt is None:
        return None, None
    return sides.segment_ids_nbt[_source(ring, 0)], sides.segment_ids_nbt[_source(ring, i)]


def _masks_by_position(ring: ContextRing, sides: Sides, i, q, window: int) -> dict[str, Any]:
    """Returns the masks of a call in which positions decide, for keys that have come `i` hops."""
    own, other = _segments(ring, sides, i)
    places = [_places(ring, _source(ring, hops), q.shape[:2]) for hops in (0, i)]
    return {
        "causal": True,
        "window": (window, 0),
        "positions": tuple(places),
        "segment_ids": None if own is None else (own, other),
    }


def _places(ring: ContextRing, device: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns where the tokens of a device lie in the sequence, int32 [b, t]."""
    chunk = shape[1] // 2
    numbers = jnp.stack([device, 2 * ring.ways - 1 - device])
    places = numbers[:, None] * chunk + jnp.arange(chunk)
    return jnp.broadcast_to(places.reshape(-1).astype(jnp.int32), shape)


def _stacked_segments(ring: ContextRing, sides: Sides, i, halves: "_Halves"):
    own, other = _segments(ring, sides, i)
    return None if own is None else (halves.stack_queries(own), halves.stack_keys(other))


# Halves.


@dataclass(frozen=True)
class _Halves:
    """The two pairs of halves that see each other in a hop, stacked as a batch [2 b, t / 2, ...].

    First the later queries with the earlier keys. Then the earlier halves of both if the keys come
    from an earlier device (`is_earlier`), and the later halves if not.
    """

    is_earlier: jax.Array

    def stack_queries(self, x_bt: jax.Array) -> jax.Array:
        earlier, later = jnp.split(x_bt, 2, 1)
        return jnp.concatenate((later, jnp.where(self.is_earlier, earlier, later)))

    def stack_keys(self, x_bt: jax.Array) -> jax.Array:
        earlier, later = jnp.split(x_bt, 2, 1)
        return jnp.concatenate((earlier, jnp.where(self.is_earlier, earlier, later)))

    def unstack_queries(self, x_2bt: jax.Array) -> jax.Array:
        """Sums what each query found, [b, t, ...]."""
        later, either = jnp.split(x_2bt, 2)
        earlier = jnp.where(self.is_earlier, either, 0)
        return jnp.concatenate((earlier, later + jnp.where(self.is_earlier, 0, either)), 1)

    def unstack_keys(self, x_2bt: jax.Array) -> jax.Array:
        earlier, either = jnp.split(x_2bt, 2)
        later = jnp.where(self.is_earlier, 0, either)
        return jnp.concatenate((earlier + jnp.where(self.is_earlier, either, 0), later), 1)

    def join(self, state: Attended, found: Attended) -> Attended:
        """Returns `state` [b, t, ...] joined with what the stacked queries found."""
        (out_earlier, out_later), (lse_earlier, lse_later) = (jnp.split(x, 2, 1) for x in state)
        (out, out_either), (lse, lse_either) = (jnp.split(x, 2) for x in found)
        of_earlier = jnp.where(self.is_earlier, lse_either, -jnp.inf)
        of_later = jnp.where(self.is_earlier, -jnp.inf, lse_either)
        earlier = join(out_earlier, lse_earlier, out_either, of_earlier)
        later = join(*join(out_later, lse_later, out, lse), out_either, of_later)
        out, lse = (jnp.concatenate(each, 1) for each in zip(earlier, later, strict=True))
        return out, lse


def join(out: jax.Array, lse: jax.Array, more: jax.Array, more_lse: jax.Array) -> Attended:
    """Returns attention to two sets of keys from attention to each; `out` is wide.

    An lse of -inf is that of no keys.
    """
    both = jnp.logaddexp(lse, more_lse)
    safe = jnp.where(jnp.isneginf(both), 0, both)
    share = jnp.exp(lse - safe)[..., None]
    more_share = jnp.exp(more_lse - safe)[..., None]
    return out * share + more.astype(out.dtype) * more_share, both


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _shift(ring: ContextRing, step: int, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the arrays of the device `step` places before this one, in one permute."""
    pairs = [(device, (device + step) % ring.ways) for device in range(ring.ways)]
    flat = jnp.concatenate([x.reshape(-1) for x in arrays])
    moved = jax.lax.ppermute(flat, ring.axes, pairs)
    ends = np.cumsum([x.size for x in arrays])
    parts = jnp.split(moved, ends[:-1])
    return tuple(part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True))
