"""Ring attention in zigzag order (arXiv:2310.01889): causal, and the same work on every device.

n devices cut the time into 2 n chunks, and device r has the chunks r and 2 n - 1 - r, the *earlier*
and the *later* half of its tokens. Keys and values travel round the ring: after i hops a device has
those of device j = r - i (mod n), and no hop needs a causal mask.

    i = 0   attention to the device's own tokens: they ascend, so it is plain causal
    j < r   both halves of the queries see the earlier half of the keys, all of it, and nothing else
    j > r   the later half of the queries sees all keys, and the earlier half none

So in every hop the later half of the queries sees the earlier half of the keys, and one more pair
of halves matches: earlier and earlier, or later and later. Only the start of a slice says which
pair it is: shapes are the same everywhere, and no device branches on its rank, which collectives
forbid.

With a window, positions decide the masks, and keys travel only as far as some query sees: as many
hops in one direction as in the other. Packed documents mask by the segment ids of both sides.

Parts of a softmax are joined by their lse. The backward pass is a second ring, with the lse of all
keys. The gradients of keys travel with them, in float32, and end on the keys' own device. A hop is
the body of a scan: program and memory do not grow with n.

b: sequences, t: tokens of a device, h: query heads, k: key-value heads, d, e: head dims.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import SAVED, attention_backward, attention_forward, delta_of

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
    """The inputs from which the masks of a hop are made."""

    kind: jax.Array | None  # the index of the layer's window; None: there is one window
    segment_ids_nbt: jax.Array | None  # of all devices


class OfQueries(NamedTuple):
    """The values of each query that the backward pass reads; lse and delta cover all keys."""

    q_bthd: jax.Array
    dout_bthe: jax.Array
    lse_bth: jax.Array
    delta_bth: jax.Array


KeyValues = tuple[jax.Array, jax.Array]  # [b, t, k, d] and [b, t, k, e]
# Both in one array [2, b, t, k, d], which one permute moves; if d is not e, one array for each.
Packed = list[jax.Array]
TIME, PACKED_TIME = 1, 2  # dims


def legs(ring: ContextRing, tokens: int) -> list[tuple[int, int]]:
    """Returns the legs of the keys' journey: (step of a hop, number of hops), for `tokens` of a
    device.

    Chunks that are at most m apart are on devices that are at most m hops apart.
    """
    n = ring.ways
    farthest = n
    if None not in ring.windows:
        chunk = tokens // 2
        widest = max(window for window in ring.windows if window is not None)
        farthest = (widest - 1) // chunk + 1 if widest else 0
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
    """Returns (out, lse) with the keys of `leg` joined in.

    The next keys travel while a kernel runs.
    """
    step, count = leg
    q, kv = arrays

    def body(carry, i):
        packed, state = carry
        following = _shift(ring, step, packed)
        return (following, _hop_forward(ring, sides, step * i, (q, packed), state)), None

    start = (_shift(ring, step, _packed(kv)), state)
    (packed, state), _ = jax.lax.scan(body, start, jnp.arange(1, count))
    return _hop_forward(ring, sides, step * count, (q, packed), state)


def _ring_backward(ring, residuals, gradients):
    q, k, v, segment_ids, kind, out, lse = residuals
    queries = OfQueries(q, gradients[0], lse, delta_of((out, lse), gradients))
    sides = Sides(kind, _gathered(ring, segment_ids))
    dq, *of_keys = map(_wide, _own_backward(ring, sides, queries, (k, v)))
    total = _packed(of_keys)
    for leg in legs(ring, q.shape[1]):
        dq, of_leg = _leg_backward(ring, sides, leg, (queries, (k, v)), dq)
        total = _sum(total, of_leg)
    dk, dv = _unpacked(total)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


def _leg_backward(ring, sides, leg, arrays, dq):
    """Returns (dq with the part of this leg, packed dk and dv of this leg).

    The sums dk and dv travel one hop after their keys, so that they too overlap with a kernel.
    """
    step, count = leg
    queries, kv = arrays

    def body(carry, i):
        packed, *sums = carry
        following = _shift(ring, step, packed)
        sums[1] = _shift(ring, step, sums[1])
        return (following, *_hop_backward(ring, sides, step * i, (queries, packed), sums)), None

    first = _shift(ring, step, _packed(kv))
    following = _shift(ring, step, first) if count > 1 else first
    nothing = [jnp.zeros_like(_wide(x)) for x in first]
    sums = _hop_backward(ring, sides, step, (queries, first), (dq, nothing))
    (_, dq, dkv), _ = jax.lax.scan(body, (following, *sums), jnp.arange(2, count + 1))
    return dq, _shift(ring, -step * count, dkv)  # home


ring_attention.defvjp(_ring_forward, _ring_backward)


# One call of a kernel: for the device's own keys, or for those of one hop.


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
    q, packed = arrays

    def attend(window: int | None) -> Attended:
        if window is not None:
            masks = _masks_by_position(ring, sides, i, q, window)
            kv = _unpacked(packed)
            return join(state, attention_forward(q, *kv, **masks, **ring.options))
        joined = state
        for of_queries, of_keys in _pairs(ring, i, q.shape[TIME]):
            attended = attention_forward(
                _half(q, of_queries),
                *_unpacked(_half(packed, of_keys, PACKED_TIME)),
                segment_ids=_half_segments(ring, sides, i, (of_queries, of_keys)),
                **ring.options,
            )
            joined = _put(joined, join(_half(joined, of_queries), attended), of_queries)
        return joined

    return _by_window(ring, sides, attend)


def _hop_backward(ring: ContextRing, sides: Sides, i, arrays, sums):
    """Returns the sums (dq, packed dk and dv), with those of the keys that have come `i` hops."""
    queries, packed = arrays

    def gradients(window: int | None):
        dq, dkv = sums
        if window is not None:
            masks = _masks_by_position(ring, sides, i, queries.q_bthd, window)
            more, *of_keys = map(_wide, _backward(ring, queries, _unpacked(packed), masks))
            return dq + more, _sum(dkv, _packed(of_keys))
        for of_queries, of_keys in _pairs(ring, i, queries.q_bthd.shape[TIME]):
            # One pair after the other: operands of both at once would take more memory.
            of_queries, dq = jax.lax.optimization_barrier((of_queries, dq))
            masks = {"segment_ids": _half_segments(ring, sides, i, (of_queries, of_keys))}
            kv = _unpacked(_half(packed, of_keys, PACKED_TIME))
            parts = _backward(ring, _half(queries, of_queries), kv, masks)
            more, *more_kv = map(_wide, parts)
            dq = _put(dq, _half(dq, of_queries) + more, of_queries)
            total = _sum(_half(dkv, of_keys, PACKED_TIME), _packed(more_kv))
            dkv = _put(dkv, total, of_keys, PACKED_TIME)
        return dq, dkv

    return _by_window(ring, sides, gradients)


def _backward(ring: ContextRing, queries: OfQueries, kv: KeyValues, masks: dict[str, Any]):
    q, dout, lse, delta = queries
    return attention_backward((q, *kv), dout, lse, delta, **masks, **ring.options)


def _by_window(ring: ContextRing, sides: Sides, function: Callable[[int | None], Any]) -> Any:
    """Returns `function` applied to the layer's window: a branch by its kind, without a
    collective.
    """
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
    """Returns the positions in the sequence of a device's tokens, int32 [b, t]."""
    chunk = shape[1] // 2
    numbers = jnp.stack([device, 2 * ring.ways - 1 - device])
    places = numbers[:, None] * chunk + jnp.arange(chunk)
    return jnp.broadcast_to(places.reshape(-1).astype(jnp.int32), shape)


# Halves of the tokens.


def _pairs(ring: ContextRing, i, tokens: int) -> list[tuple[Any, Any]]:
    """Returns the starts (of queries, of keys) of the two pairs of halves that see each other."""
    half = tokens // 2
    source = _source(ring, i)
    matching = jnp.where(source < jax.lax.axis_index(ring.axes), 0, half)
    # No source is below 0, but XLA must not know that: it would slice once before all hops, and
    # keep the slices.
    later = jnp.where(source < 0, 0, half)
    return [(later, 0), (matching, matching)]


def _half(tree: Any, start: Any, dim: int = TIME) -> Any:
    """Returns the half of each array that starts at `start`."""

    def cut(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, x.shape[dim] // 2, dim)

    return jax.tree.map(cut, tree)


def _put(tree: Any, halves: Any, start: Any, dim: int = TIME) -> Any:
    """Returns the arrays with their half at `start` replaced."""

    def put(x: jax.Array, half: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, half, start, dim)

    return jax.tree.map(put, tree, halves)


def _half_segments(ring: ContextRing, sides: Sides, i, starts: tuple[Any, Any]) -> Any:
    """Returns the segment ids of a pair of halves, or None."""
    if sides.segment_ids_nbt is None:
        return None
    return tuple(map(_half, _segments(ring, sides, i), starts))


def _sum(trees: Any, more: Any) -> Any:
    return jax.tree.map(jnp.add, trees, more)


def join(attended: Attended, more: Attended) -> Attended:
    """Returns attention to two sets of keys, given attention to each; the first is float32.

    An lse of -inf stands for no keys.
    """
    out, lse = attended
    more_out, more_lse = more
    both = jnp.logaddexp(lse, more_lse)
    safe = jnp.where(jnp.isneginf(both), 0, both)
    share = jnp.exp(lse - safe)[..., None]
    more_share = jnp.exp(more_lse - safe)[..., None]
    return out * share + more_out.astype(out.dtype) * more_share, both


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


# Permutes.


def _packed(kv: Sequence[jax.Array]) -> Packed:
    k, v = kv
    return [jnp.stack((k, v))] if k.shape == v.shape else [k[None], v[None]]


def _unpacked(packed: Packed) -> KeyValues:
    k, v = [array for x in packed for array in x]
    return k, v


def _shift(ring: ContextRing, step: int, packed: Packed) -> Packed:
    """Returns the arrays of the device `step` places before this one."""
    pairs = [(device, (device + step) % ring.ways) for device in range(ring.ways)]
    return [jax.lax.ppermute(x, ring.axes, pairs) for x in packed]
