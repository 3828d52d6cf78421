"""Matmuls in 8-bit floats: exact where the format is, close elsewhere, and NaN for a NaN."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from spmdtrain.config import ConfigError
from spmdtrain.parallel.matmuls import delayed, float8
from spmdtrain.parallel.matmuls.delayed import Cut, Operand
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.deviceless import described_devices

SHAPES = {"one dim": ((3, 8, 6), (6, 4, 2), 1), "two dims": ((3, 8, 4, 2), (4, 2, 6), 2)}


def operands(shapes, draw=jax.random.normal):
    x_key, w_key = jax.random.split(jax.random.key(1))
    return draw(x_key, shapes[0]), draw(w_key, shapes[1])


def few_integers(key, shape):
    """Integers of e4m3 and e5m2 alike, the largest a power of two, so that its scale is one."""
    return jax.random.randint(key, shape, -1, 2).astype(jnp.float32).at[(0,) * len(shape)].set(1)


def gradients(dot, x, w, contracted):
    def total(x, w):
        return jnp.sum(jnp.square(dot(x, w, contracted)))

    return jax.grad(total, (0, 1))(x, w)


def off(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.seconds
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_products_of_few_integers_are_exact(shapes):
    x, w = operands(shapes, few_integers)
    got = float8.tensordot(x, w, shapes[2])
    np.testing.assert_allclose(got, jnp.tensordot(x, w, shapes[2]), rtol=1e-6, atol=1e-6)


@pytest.mark.seconds
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_products_and_gradients_are_as_close_as_the_formats(shapes):
    """Half a unit in the last place is 1/16 of a number in e4m3, and 1/8 in e5m2."""
    x, w = operands(shapes)
    contracted = shapes[2]
    got = float8.tensordot(x, w, contracted)
    want = jnp.tensordot(x, w, contracted)
    assert 1e-3 < off(got, want) < 0.06
    found = gradients(float8.tensordot, x, w, contracted)
    for each, true in zip(found, gradients(jnp.tensordot, x, w, contracted), strict=True):
        assert each.dtype == true.dtype
        assert 1e-3 < off(each, true) < 0.12


def test_size_does_not_matter():
    """Numbers that e4m3 and bfloat16 products would lose or overflow have a scale of their own."""
    x, w = operands(SHAPES["one dim"])
    want = float8.tensordot(x, w, 1)
    got = float8.tensordot(x * 2.0**30, w * 2.0**-40, 1)
    np.testing.assert_allclose(got, want * 2.0**-10, rtol=1e-6)


def test_in_float16_no_sum_overflows_before_it_is_scaled():
    x, w = (each.astype(jnp.float16) for each in operands(SHAPES["two dims"]))
    y, backward = jax.vjp(lambda x, w: float8.tensordot(x, w, 2), x, w)
    assert y.dtype == jnp.float16 and off(y, jnp.tensordot(x, w, 2)) < 0.06
    assert all(np.isfinite(each).all() for each in backward(y))


def test_an_array_of_zeros_has_a_product_of_zeros():
    assert not np.any(float8.tensordot(jnp.zeros((2, 3)), jnp.ones((3, 4)), 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_product_and_the_gradients(bad):
    x, w = operands(SHAPES["one dim"])
    run = jax.jit(lambda x, w: (float8.tensordot(x, w, 1), gradients(float8.tensordot, x, w, 1)))
    y, (_, dw) = run(x.at[1, 2, 3].set(bad), w)
    assert np.isnan(y).any()
    assert np.isnan(dw).any()


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable"])
def test_what_a_checkpoint_keeps_is_not_rounded(policy):
    """The largest e4m3 is no number in the IEEE format of that many bits, to which jax rounds."""
    x, w = operands(SHAPES["one dim"])
    keeps = jax.checkpoint(
        lambda x, w: float8.tensordot(jnp.sin(x), w, 1),
        policy=getattr(jax.checkpoint_policies, policy),
    )
    want = gradients(lambda x, w, n: float8.tensordot(jnp.sin(x), w, n), x, w, 1)
    found = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.square(keeps(x, w))), (0, 1)))(x, w)
    for each, true in zip(found, want, strict=True):
        np.testing.assert_allclose(each, true, rtol=1e-5)


@pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin"
)
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_matmul_and_both_gradients_are_8_bit_matmuls_of_the_library_on_hopper(scaling):
    """Also where a dim is no multiple of 16, which cuBLASLt wants: XLA pads it."""
    (device,) = described_devices(DEVICES["h100"], 1)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(64, 40), (40, 24), (64, 24)]]

    def multiply(x, w):
        if scaling == "current":
            return float8.tensordot(x, w, 1)
        operand = Operand(w, jnp.ones(3), jnp.zeros((1, 1, 2)))
        return delayed.tensordot(x, operand, 1, Cut((1, 1), (1, 1)))

    def step(x, w, dy):
        y, backward = jax.vjp(multiply, x, w)
        return y, *backward(dy)

    made = jax.jit(step, out_shardings=SingleDeviceSharding(device)).lower(*shapes)
    # Without a device nothing times Triton's matmuls, and one of them would stay.
    text = made.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert text is not None
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert 'custom_call_target="__cublas$lt$matmul"' not in text


def test_a_gpu_without_8_bit_matmuls_is_refused():
    for kind in ("NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB"):
        with pytest.raises(ConfigError, match="multiplies no 8-bit floats"):
            float8.check_float8(kind)
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA GB200", "cpu"):
        float8.check_float8(kind)
    assert DEVICES["h100"].peak("float8") == pytest.approx(
        2 * DEVICES["h100"].peak("bfloat16"), rel=1e-3
    )
    with pytest.raises(ConfigError, match="no rate of 8-bit floats is known for a100-80"):
        DEVICES["a100-80"].peak("float8")
