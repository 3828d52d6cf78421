"""With `jax_enable_x64` every public function gives what it gives without: values, gradients.

A program that wants 64 bits somewhere has them everywhere: plain numbers and counters widen, and
meet the 32 bits that kernels count in. Then jax refuses the mixture, or a result comes back wider
than its input.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import attention, tiling, xla
from pallas_kernels.attention.tiling import Tile
from pallas_kernels.grouped import grouped_matmul, tile_groups, tiles_for
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.norm import layernorm, rmsnorm

pytestmark = pytest.mark.long

T, S = 20, 24


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def attended(q, k, v, bias=None, **options):
    out, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
    return out, jnp.where(lse > -jnp.inf, lse, 0)


def with_residual(norm, x, scale, residual, **options):
    return norm(x, scale, residual=residual, **options)


def routed(x, w):
    place, expert_of_tile = tile_groups(np.array([3, 0, 2]), 6, 4)  # the last row is nobody's
    rows = jnp.zeros((4 * tiles_for(6, 3, 4), x.shape[1]), x.dtype)
    return grouped_matmul(rows.at[place].set(x, mode="drop"), w, expert_of_tile)


def split_over_devices(x, weight, mask):
    """The loss on 2 x 2 devices: the batch split over two, the weight's rows over two."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def part(x, weight, mask, targets):
        loss = linear_cross_entropy(
            x, weight, targets, mask=mask, axis_name=("tensor",), chunk_logits=40
        )
        return jax.lax.psum(loss, "data")

    specs = P("data"), P("tensor"), P("data"), P("data")
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return run(x, weight, mask, jax.lax.convert_element_type(TARGETS, int))


# Integers as numpy makes them: of 64 bits, which jax keeps under jax_enable_x64 only.
PLACES = np.arange(T) + np.array([[2], [5]]), np.broadcast_to(np.arange(S), (2, S))
SEGMENTS = np.arange(T) // 9 + np.array([[0], [1]]), np.arange(S) // 9 + np.array([[0], [1]])
TARGETS = np.arange(2 * T).reshape(2, T) % 12

QKV = normal(2, T, 4, 16), normal(2, S, 2, 16), normal(2, S, 2, 8)
NORM, LOSS = (normal(6, 24), normal(24)), (normal(2, T, 6), normal(12, 6))
MASK = (np.arange(2 * T).reshape(2, T) % 3 > 0).astype(np.float32)

PLACED = {
    "positions": PLACES,
    "segment_ids": SEGMENTS,
    "causal": True,
    "window": (9, 0),
    "softcap": 7.0,
}
CALLS = {  # a function and its arrays
    "attention": (attended, QKV),
    "attention window": (partial(attended, causal=True, window=(9, 0)), QKV),
    "attention places": (partial(attended, **PLACED), QKV),
    "attention places triton:interpret": (
        partial(attended, implementation="triton:interpret", **PLACED),
        QKV,
    ),
    "attention bias": (partial(attended, causal=True), (*QKV, normal(2, 4, T, S))),
    "attention bias of keys": (attended, (*QKV, normal(2, 1, 1, S))),
    "attention bias of queries": (
        partial(attended, segment_ids=SEGMENTS),
        (*QKV, normal(1, 4, T, 1)),
    ),
    "grouped_matmul": (routed, (normal(6, 24), normal(3, 24, 8))),
    "layernorm": (layernorm, (*NORM, normal(24))),
    "layernorm residual": (partial(with_residual, layernorm), (*NORM, normal(6, 24))),
    "rmsnorm": (rmsnorm, NORM),
    "rmsnorm residual": (partial(with_residual, rmsnorm), (*NORM, normal(6, 24))),
    "linear_cross_entropy": (
        lambda x, weight: linear_cross_entropy(
            x, weight, TARGETS, label_smoothing=0.1, z_loss=1e-3, ignore_index=3
        ),
        LOSS,
    ),
    "linear_cross_entropy mask": (
        lambda x, weight, mask: linear_cross_entropy(
            x, weight, TARGETS, mask=mask, chunk_logits=40
        ),
        (*LOSS, MASK),
    ),
    "linear_cross_entropy split": (split_over_devices, (*LOSS, MASK)),
}


@pytest.fixture
def small_tiles(tiles):
    """Several of each kind, so that the indices of tiles count."""
    tiles.setattr(xla, "BLOCK", 8)
    for name in ("FORWARD", "DQ", "DKV"):
        tiles.setattr(tiling, name, {4: {64: Tile(16, 16, 4, 1)}})


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", CALLS)
def test_the_same_with_64_bits(name):
    run, arrays = CALLS[name]

    @jax.jit
    def both(*arrays):
        out, pull = jax.vjp(run, *arrays)
        return out, pull(out)

    def answer(wide):
        with jax.enable_x64(wide):
            return jax.tree.map(np.asarray, both(*arrays))

    got, want = answer(True), answer(False)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
