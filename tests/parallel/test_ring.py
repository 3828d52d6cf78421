"""Ring attention and Ulysses against the definition of attention, values and gradients."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import reference
from pallas_kernels.attention.problem import prepare
from spmdtrain.parallel.context.context_method import zigzag_order
from spmdtrain.parallel.context.ring import ContextRing, legs, ring_attention
from spmdtrain.parallel.context.ulysses import heads_for_time

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
TOKENS = 64


def drawn(tokens: int, packed: bool, kv_heads: int = KV_HEADS):
    """q, k, v, gradient of the output, gradient of lse, segment ids; in natural order."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((BATCH, tokens, *shape), np.float32)

    q, k, v = normal(HEADS, DIM), normal(kv_heads, DIM), normal(kv_heads, DIM)
    segments = None
    if packed:  # documents of several lengths, whose ends lie inside chunks
        ends = rng.random((BATCH, tokens)) < 0.15
        segments = np.cumsum(ends, 1).astype(np.int32)
    return q, k, v, normal(HEADS, DIM), normal(HEADS), segments


def definition(q, k, v, dout, dlse, segments, window):
    """(out, lse, dq, dk, dv) by the reference."""
    options = {"softcap": None, "scale": None, "bias": None, "positions": None}
    seen = None if window is None else (window, 0)

    def attend(q, k, v):
        masks = {"causal": True, "window": seen, "segment_ids": segments}
        return reference.attend(*prepare(q, k, v, **masks, **options))

    found, pull = jax.vjp(attend, q, k, v)
    return *found, *pull((dout, dlse))


def on_devices(ways: int, local, arrays, zigzag: bool):
    """`local` of each device's part of the arrays [b, t, ...], in natural order in and out."""
    mesh = Mesh(jax.devices()[:ways], ("context",))
    order = zigzag_order(arrays[0].shape[1], ways if zigzag else 1)
    spec = P(None, "context")
    region = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    given = [None if x is None else x[:, order] for x in arrays]
    found = jax.jit(region)(*given)
    return [np.asarray(x)[:, np.argsort(order)] for x in found]


def with_gradients(attend, q, k, v, dout, dlse, segments):
    (out, lse), pull = jax.vjp(lambda *qkv: attend(*qkv, segments), q, k, v)
    return out, lse, *pull((dout, dlse))


def test_tokens_in_zigzag_order_are_each_once():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag_order(6, 1).tolist() == [0, 1, 2, 3, 4, 5]


def assert_close(got, want):
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        worst = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
        assert worst < 1e-5, f"{name}: {worst}"


def check(ways: int, window: int | None, packed: bool, tokens: int = TOKENS, kv_heads=KV_HEADS):
    *arrays, segments = drawn(tokens, packed, kv_heads)
    ring = ContextRing(("context",), ways, (window,))
    local = partial(with_gradients, partial(ring_attention, ring))
    got = on_devices(ways, local, [*arrays, segments], True)
    assert_close(got, jax.jit(partial(definition, window=window))(*arrays, segments))


# None; between a chunk and a sequence; smaller than a chunk; of a token that sees itself alone.
WINDOWS = (None, 20, 3, 0)
GRID = [*itertools.product((2, 4, 8), WINDOWS, (False, True))]
CASES = [(4, None, True), (8, 3, False)]


@pytest.mark.seconds
@pytest.mark.parametrize(("ways", "window", "packed"), CASES)
def test_a_ring_is_attention(ways, window, packed):
    check(ways, window, packed)


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "window", "packed"), [case for case in GRID if case not in CASES])
def test_every_ring_is_attention(ways, window, packed):
    check(ways, window, packed)


@pytest.mark.seconds
def test_a_chunk_may_be_one_token():
    check(4, None, False, tokens=8)


def test_keys_go_no_farther_than_a_window_reaches():
    def of(window):
        return legs(ContextRing(("context",), 8, (window,)), 16)  # chunks of 8 tokens

    assert of(None) == [(1, 7)]
    assert of(0) == []
    assert of(1) == [(1, 1), (-1, 1)]  # into the chunk before
    assert of(8) == [(1, 1), (-1, 1)]
    assert of(9) == [(1, 2), (-1, 2)]
    assert of(40) == [(1, 7)]


def test_ulysses_is_attention():
    *arrays, _ = drawn(32, False, kv_heads=4)

    def attend(q, k, v, _):
        groups = q.reshape(*q.shape[:2], 4, 1, DIM)

        def local(q, k, v):
            options = dict.fromkeys(("segment_ids", "window", "softcap", "scale", "bias"))
            flat = q.reshape(*q.shape[:2], -1, DIM)
            given = prepare(flat, k, v, causal=True, positions=None, **options)
            return reference.attend(*given)[0].reshape(q.shape)

        out = heads_for_time(local, ("context",), groups, k, v).reshape(q.shape)
        return out, jnp.zeros(q.shape[:3])

    got = on_devices(4, partial(with_gradients, attend), [*arrays, None], False)
    want = jax.jit(partial(definition, window=None))(*arrays[:4], 0 * arrays[4], None)
    got[1] = np.asarray(want[1])
    assert_close(got, want)
