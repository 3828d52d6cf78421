"""Sums in 8 bits: right where 8 bits suffice, else within the rounding of each block; on all
devices the same bits, and a number that is not finite is lost by none.
"""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled import hlo
from spmdtrain.config import CompressionConfig
from spmdtrain.parallel.compress import Codec, codec_of

WAYS = 4
BLOCK = 32
FORMATS = ("int8", "float8")
# Relative to the largest number of a block: a step of 127, rounded at random, or half a step of a
# mantissa of 3 bits.
ROUNDING = {"int8": 1 / 127, "float8": 2.0**-4}


def mesh(ways):
    return jax.make_mesh((ways,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def region(function, x):
    """Jits `function` of what each device has: x [devices, ...], one for each."""
    on_one = jax.shard_map(
        lambda x: function(x[0])[None],
        mesh=mesh(len(x)),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    return jax.jit(on_one), jax.device_put(x, NamedSharding(mesh(len(x)), P("data")))


def on_devices(function, x):
    jitted, placed = region(function, x)
    return np.asarray(jitted(placed))


def summed(x, format, block=BLOCK, within=1):
    codec = Codec(format, block)
    return on_devices(partial(codec.sum, axis="data", within=within), x)


def drawn(*shape):
    """Numbers of very different sizes, from block to block too."""
    draw = np.random.default_rng(3)
    return (draw.normal(size=shape) * 10.0 ** draw.integers(-6, 6, (*shape[:-1], 1))).astype("f4")


@pytest.mark.parametrize("format", FORMATS)
def test_integers_that_the_codec_has_are_summed_to_the_rounding_of_the_scale(format):
    """Each block has the largest number of the codec, and devices differ by powers of two."""
    most = 127 if format == "int8" else 448
    draw = np.random.default_rng(1)
    one = draw.integers(-8, 9, (8, BLOCK)).astype("f4")
    one[:, 5] = most
    x = np.stack([one * 2.0**device for device in range(WAYS)]).astype("f4")
    got = summed(x, format)
    np.testing.assert_allclose(got, np.broadcast_to(x.sum(0), got.shape), rtol=3e-7)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(24, 40), (7, 33), (3, 5, 11)])
def test_a_sum_is_off_by_the_rounding_of_its_blocks_and_the_same_everywhere(format, shape):
    x = drawn(WAYS, *shape)
    got = summed(x, format)
    assert all(np.array_equal(got[0], each) for each in got)
    assert not np.array_equal(got[0], x.sum(0)), "nothing was rounded"

    rows = np.pad(x.reshape(WAYS, -1), ((0, 0), (0, -x[0].size % (WAYS * BLOCK))))
    largest = np.abs(rows).reshape(WAYS, -1, BLOCK).max(-1).astype("f8")
    bound = ROUNDING[format] * (largest.sum(0) * (1 + ROUNDING[format]) + largest.sum(0))
    off = np.abs(got[0].astype("f8") - x.astype("f8").sum(0)).reshape(-1)
    off = np.pad(off, (0, rows.shape[1] - off.size)).reshape(-1, BLOCK).max(-1)
    assert np.all(off <= 1.01 * bound)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_scattered_sum_is_rounded_once(format, dim):
    x = drawn(WAYS, 8, 12, 4)
    scatter = partial(Codec(format, BLOCK).scatter_sum, axis="data", dim=dim)
    got = np.concatenate(list(on_devices(scatter, x)), axis=dim)
    assert got.shape == x.shape[1:]

    def slices(x):
        first = np.moveaxis(x, dim, 0).reshape(WAYS, -1)
        return np.pad(first, ((0, 0), (0, -first.shape[1] % BLOCK))).reshape(WAYS, -1, BLOCK)

    largest = np.stack([np.abs(slices(each)).max(-1) for each in x]).sum(0)
    off = np.abs(slices(got - x.astype("f8").sum(0))).max(-1)
    assert np.all(off <= 1.01 * ROUNDING[format] * largest)
    assert off.max() > 0, "nothing was rounded"


def test_what_is_below_half_a_step_of_int8_is_right_on_average():
    """Beside one 300 times as large, as gradients of queries are beside those of values."""
    draw = np.random.default_rng(2)
    x = draw.uniform(0.5, 1.0, (2000, BLOCK)).astype("f4") / 300
    x[:, 0] = draw.uniform(0.5, 1.0, 2000)
    codec = Codec("int8", BLOCK)
    got = np.asarray(codec.decode(codec.encode(jnp.asarray(x))))[:, 1:]
    error = got.std() / got.size**0.5
    assert abs(got.mean() - x[:, 1:].mean()) < 4 * error
    assert error < 0.01 * x[:, 1:].mean()
    by_place = got.mean(0) - x[:, 1:].mean(0)
    assert np.all(np.abs(by_place) < 5 * error * (BLOCK - 1) ** 0.5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_reaches_every_device(format, bad):
    x = drawn(WAYS, 16, BLOCK)
    x[2, 5, 7] = bad
    got = summed(x, format)
    assert not np.isfinite(got[:, 5, 7]).any()
    assert np.isfinite(got[:, :5]).all() and np.isfinite(got[:, 6:]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_the_smallest_numbers_stay_finite(format):
    x = np.zeros((WAYS, 4, BLOCK), "f4")
    x[:, 1] = np.finfo("f4").tiny
    x[:, 2] = 1e-45
    got = summed(x, format)
    assert np.isfinite(got).all() and not got[:, 0].any() and not got[:, 3].any()
    assert np.abs(got - x.sum(0)).max() <= 2 * WAYS * np.finfo("f4").tiny


def compiled_text(function, x):
    jitted, placed = region(function, x)
    return jitted.lower(placed).compile().as_text()


def bytes_sent(function, x):
    text = compiled_text(function, x)
    return sum(each["sent"] for each in hlo.traffic(text, {"data": len(x)}))


def test_the_compiled_text_sends_a_byte_and_a_scale_for_each_number():
    x = np.zeros((WAYS, 512, 512), "f4")
    whole = bytes_sent(lambda x: jax.lax.psum(x, "data"), x)
    codec = Codec("int8", 256)
    share = (1 + 4 / codec.block) / 4
    got = bytes_sent(partial(codec.sum, axis="data"), x)
    assert got == pytest.approx(share * whole, rel=1e-3)
    half = bytes_sent(partial(codec.scatter_sum, axis="data", dim=0), x)
    assert half == pytest.approx(share * whole / 2, rel=1e-3)


def test_vectors_and_what_is_less_than_a_block_for_each_device_stay_wide():
    settings = CompressionConfig(codec="int8", block=64)
    assert codec_of(settings, (16, 16), WAYS) == Codec("int8", 64)
    assert codec_of(settings, (16, 15), WAYS) is None
    assert codec_of(settings, (4096,), WAYS) is None
    assert codec_of(CompressionConfig(), (64, 64), WAYS) is None


def test_bfloat16_comes_back_as_bfloat16():
    x = jnp.ones((WAYS, 8, BLOCK), jnp.bfloat16)
    sum_of = partial(Codec("int8", BLOCK).sum, axis="data")
    jitted, placed = region(sum_of, x)
    got = jitted(placed)
    assert got.dtype == jnp.bfloat16 and np.array_equal(got, np.full(x.shape, WAYS, "f4"))


# --- neighbours that sum in full ------------------------------------------------------------------

DEVICES = 8


def powers(*shape):
    """Integers times powers of two, which float32 sums exactly; blocks differ in size."""
    draw = np.random.default_rng(5)
    return (draw.integers(-999, 1000, shape) * 2.0 ** draw.integers(-3, 4, shape[-2:])).astype("f4")


def of_neighbours(x, within):
    return x.reshape(-1, within, *x.shape[1:]).sum(1)


@pytest.mark.parametrize("within", [2, 4])
@pytest.mark.parametrize("shape", [(24, 40), (7, 33)])
def test_neighbours_sum_in_full_and_only_their_sums_are_rounded(shape, within):
    x = powers(DEVICES, *shape)
    got, want = summed(x, "int8", within=within), summed(of_neighbours(x, within), "int8")
    assert all(np.array_equal(got[0], each) for each in got)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6 * np.abs(want).max())
    assert np.abs(want[0] - x.sum(0)).max() > 1e-3 * np.abs(want).max(), "nothing was rounded"


@pytest.mark.parametrize(("dim", "within"), [(0, 4), (1, 2), (2, 4)])
def test_a_scattered_sum_over_neighbours_is_rounded_once_for_each_group(dim, within):
    x, codec = powers(DEVICES, 8, 16, 32), Codec("float8", BLOCK)
    scatter = partial(codec.scatter_sum, axis="data", dim=dim)
    got = np.concatenate(list(on_devices(partial(scatter, within=within), x)), axis=dim)
    want = np.concatenate(list(on_devices(scatter, of_neighbours(x, within))), axis=dim)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    assert np.abs(want - x.sum(0)).max() > 1e-3 * np.abs(want).max(), "nothing was rounded"


def test_a_number_of_a_neighbour_that_is_not_finite_reaches_every_device():
    x = powers(DEVICES, 16, BLOCK)
    x[5, 3, 7] = np.nan
    got = summed(x, "int8", within=4)
    assert not np.isfinite(got[:, 3, 7]).any() and np.isfinite(got[:, 4:]).all()


@pytest.mark.parametrize("within", [2, 4])
def test_only_eight_bits_of_the_sums_of_neighbours_leave_their_group(within):
    """In the compiled text; a device of a group sends others its share of the group's sum."""
    groups, codec, size = DEVICES // within, Codec("int8", 256), 512 * 512
    x = np.zeros((DEVICES, 512, 512), "f4")
    text = compiled_text(partial(codec.sum, axis="data", within=within), x)
    sent = Counter()
    for each in hlo.instructions(text, {"data": DEVICES}):
        for dtype, count in each.bytes_by_dtype.items():
            sent[each.members, dtype] += count * hlo.sent_per_output(each.kind, each.members)
    inside, across = (within - 1) / within, 2 * (groups - 1) / groups / within
    scales = 4 / codec.block
    assert sent == pytest.approx(
        {
            (within, "f32"): (4 + scales) * inside * size,
            (within, "u8"): inside * size,
            (groups, "u8"): across * size,
            (groups, "f32"): scales * across * size,
        }
    )


def test_where_all_are_neighbours_nothing_is_compressed():
    settings = CompressionConfig(codec="int8", block=64, within=WAYS)
    assert codec_of(settings, (64, 64), WAYS) is None
    assert codec_of(settings, (64, 64), 2 * WAYS) == Codec("int8", 64)
