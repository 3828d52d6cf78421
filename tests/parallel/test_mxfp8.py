"""Matmuls in blocks of 8-bit floats: the bits of the formula, exact products, NaN for a NaN."""

import importlib.util
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.config import ConfigError
from spmdtrain.parallel.matmuls import mxfp8
from spmdtrain.parallel.matmuls.collective_matmul import Ring
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.deviceless import described_devices


def formula(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(e4m3 numbers, scales) of a matrix as the paper defines them, in float64."""
    blocks = np.asarray(x, np.float64).reshape(len(x), -1, mxfp8.BLOCK)
    largest = np.abs(blocks).max(-1)
    # An exact quotient, as 448 * 2^k must not be rounded up.
    scales = np.array([[2.0 ** (np.frexp(top / 448)[1]) for top in row] for row in largest])
    scales = np.where(largest <= 448 * scales / 2, scales / 2, scales)
    numbers = (blocks / scales[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return numbers.reshape(x.shape), scales


def rounded(x: np.ndarray) -> np.ndarray:
    numbers, scales = formula(x)
    return numbers.astype(np.float64) * np.repeat(scales, mxfp8.BLOCK, 1)


def drawn(*shapes, seed: int = 1) -> list[np.ndarray]:
    """Normal numbers whose sizes differ from row to row."""
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=shape) * 2.0 ** random.integers(-9, 9, (shape[0], 1))).astype("float32")
        for shape in shapes
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_the_formula(dtype):
    """Also where the largest of a block is 448 times a power of two, or just above."""
    (x,) = drawn((16, 96))
    x[0, :32] = np.minimum(np.abs(x[0, :32]), 0.5)
    x[0, 5], x[1, 40], x[2, 70] = 448.0, 449.0, -7.0
    x = np.asarray(jnp.asarray(x, dtype), np.float32)
    found = jax.jit(mxfp8.in_blocks)(jnp.asarray(x, dtype))
    numbers, scales = formula(x)
    np.testing.assert_array_equal(found.numbers, numbers.view(np.uint8))
    np.testing.assert_array_equal(found.scales, np.log2(scales) + 127)
    np.testing.assert_array_equal(jax.jit(mxfp8.wide)(found), rounded(x))


@pytest.mark.seconds
@pytest.mark.parametrize("contracted", [1, 2])
def test_products_and_gradients_are_those_of_the_rounded_arrays(contracted):
    """Each array is rounded along the dim that is contracted, and nothing else is rounded."""
    x, w, dy = drawn((64, 96), (96, 32), (64, 32))
    inner = (96,) if contracted == 1 else (3, 32)

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: mxfp8.tensordot(x, w, contracted), x, w)
        return y, *pull(dy)

    found = run(x.reshape(2, 32, *inner), w.reshape(*inner, 4, 8), dy.reshape(2, 32, 4, 8))
    want = (
        rounded(x) @ rounded(w.T).T,
        rounded(dy) @ rounded(w).T,
        rounded(x.T) @ rounded(dy.T).T,
    )
    for ours, theirs in zip(found, want, strict=True):
        size = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=0, atol=1e-6 * size)
    off = [
        np.linalg.norm(got.reshape(true.shape) - true) / np.linalg.norm(true)
        for got, true in zip(found, (x @ w, dy @ w.T, x.T @ dy), strict=True)
    ]
    assert min(off) > 1e-3
    assert max(off) < 0.06, "half a unit in the last place is 1/16 of a number"


def test_a_row_does_not_depend_on_the_others():
    """A number of the size of 2^30 in one block takes nothing from the next."""
    x, w = drawn((2, 64), (64, 32))
    want = mxfp8.tensordot(x, w, 1)
    large = np.array(x)
    large[1] *= 2.0**30
    np.testing.assert_array_equal(mxfp8.tensordot(large, w, 1)[0], want[0])
    np.testing.assert_array_equal(mxfp8.tensordot(large, w, 1)[1], want[1] * 2.0**30)


def test_zeros_have_a_product_of_zeros():
    assert not np.any(mxfp8.tensordot(jnp.zeros((2, 32)), jnp.ones((32, 4)), 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_product_and_the_gradients(bad):
    x, w, dy = drawn((32, 64), (64, 32), (32, 32))
    x[3, 40] = bad

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: mxfp8.tensordot(x, w, 1), x, w)
        return y, pull(dy)[1]

    y, dw = run(x, w, dy)
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, 0)).all()
    assert np.isnan(dw[40]).all()


def ring_of(way: str) -> tuple[Ring, Callable[..., jax.Array]]:
    """A ring over both axes of tokens, and its matmul of x and the copies of a weight."""
    ring = Ring(
        axis="tensor",
        stream=P(None, ("context", "tensor")),
        wide=P(None, "context", "tensor"),
        narrow="mxfp8",
    )
    if way in ("gathered in pieces", "scattered in pieces"):
        return ring, ring.gather_matmul if way == "gathered in pieces" else ring.matmul_scatter
    on_parts = ring.from_stream if way == "from the stream" else ring.to_stream
    return ring, lambda x, w: on_parts(mxfp8.tensordot)(x, w, 1)


@pytest.mark.parametrize(
    "way", ["gathered in pieces", "scattered in pieces", "from the stream", "to the stream"]
)
def test_a_mesh_has_the_numbers_of_one_device(way):
    """Each device rounds its own parts, and no block lies on two."""
    ring, multiply = ring_of(way)
    stream, wide, w = drawn((128, 32), (128, 64), (32, 64))
    stream, wide = stream.reshape(2, 64, 32), wide.reshape(2, 64, 64)
    gathers = way in ("gathered in pieces", "from the stream")
    x, w, dy = (stream, w, wide) if gathers else (wide, w.T, stream)

    def run(multiply, x, w, dy):
        y, pull = jax.vjp(multiply, x, w)
        return y, *pull(dy)

    want = jax.jit(partial(run, lambda x, w: mxfp8.tensordot(x, w, 1)))(x, w, dy)
    specs = (ring.stream, P(None, "tensor"), ring.wide)
    if not gathers:
        specs = (ring.wide, P("tensor"), ring.stream)
    automatic = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("context", "tensor"), axis_types=automatic)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(each, NamedSharding(mesh, spec))
            for each, spec in zip((x, w, dy), specs, strict=True)
        ]
        found = jax.jit(partial(run, lambda x, w: multiply(x, ring.copy(w))))(*placed)
    for ours, theirs in zip(found, want, strict=True):
        size = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable"])
def test_what_a_checkpoint_keeps_is_not_rounded(policy):
    x, w = drawn((32, 32), (32, 32))
    policy = getattr(jax.checkpoint_policies, policy)

    def gradients(keep):
        def total(x, w):
            return jnp.sum(jnp.square(keep(lambda x, w: mxfp8.tensordot(jnp.sin(x), w, 1))(x, w)))

        return jax.jit(jax.grad(total, (0, 1)))(x, w)

    kept = gradients(lambda function: jax.checkpoint(function, policy=policy))
    for each, true in zip(kept, gradients(lambda function: function), strict=True):
        np.testing.assert_allclose(each, true, rtol=1e-5)


def test_a_device_that_multiplies_no_blocks_is_refused():
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"):
        with pytest.raises(ConfigError, match="multiplies no blocks of 8-bit floats"):
            mxfp8.check_mxfp8(kind)
    for kind in ("NVIDIA B200", "NVIDIA GB200", "cpu"):
        mxfp8.check_mxfp8(kind)
    assert DEVICES["b200"].peak("mxfp8") == DEVICES["b200"].peak("float8")
    with pytest.raises(ConfigError, match="no rate of blocks of 8-bit floats is known for h100"):
        DEVICES["h100"].peak("mxfp8")


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin"
)
def test_a_matmul_and_both_gradients_are_cudnns_on_blackwell():
    (device,) = described_devices(DEVICES["b200"], 1)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(64, 96), (96, 32), (64, 32)]]

    def step(x, w, dy):
        y, backward = jax.vjp(lambda x, w: mxfp8.tensordot(x, w, 1), x, w)
        return y, *backward(dy)

    lowered = jax.jit(step, out_shardings=SingleDeviceSharding(device)).lower(*shapes)
    assert "dot_general" not in lowered.as_text(), "the way of other devices is in the program"
    text = lowered.compile().as_text()
    assert text is not None
    assert text.count('custom_call_target="__cudnn$blockScaledDot"') == 3
    assert "__cublas" not in text
