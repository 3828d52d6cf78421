"""A bias and what follows it, against their definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.bias import biased_gelu, biased_heads
from pallas_kernels.choose import Refused

IMPLEMENTATIONS = ["xla", "triton:interpret"]


def drawn(dtype, *shapes):
    """Arrays of these shapes; the last of them float32."""
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]
    return *arrays[:-1], arrays[-1].astype(jnp.float32)


def compare(function, definition, arrays, gradients, dtype):
    """Holds values and gradients of `function` against those of `definition` in float64."""

    def both(function):
        def run(*arrays):
            out, pull = jax.vjp(function, *arrays)
            like = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, out)
            return jax.tree.leaves((out, pull(like)))

        return run

    found = jax.jit(both(function))(*arrays)
    plain = jax.jit(both(definition))(*arrays)
    exact = oracle.in_float64(both(definition), *arrays)
    for number, values in enumerate(zip(found, plain, exact, strict=True)):
        oracle.check(f"array {number}", *values, dtype, oracle.GRADIENT)


def compare_heads(shape, dtype, implementation):
    b, t, k, slots, d = shape
    products, bias_knd = drawn(dtype, shape, shape[2:])
    *gradients, _ = drawn(dtype, (b, t, k, slots - 2, d), (b, t, k, d), (b, t, k, d), (1,))

    def definition(products, bias):
        biased = (products + bias).astype(products.dtype)
        return biased[..., :-2, :], biased[..., -2, :], biased[..., -1, :]

    def heads(products, bias):
        return biased_heads(products, bias, implementation=implementation)

    compare(heads, definition, (products, bias_knd), tuple(gradients), dtype)


def compare_gelu(shape, dtype, implementation):
    products, gradient, bias_f = drawn(dtype, shape, shape, shape[-1:])

    def definition(products, bias):
        return jax.nn.gelu((products + bias).astype(products.dtype))

    def gelu(products, bias):
        return biased_gelu(products, bias, implementation=implementation)

    compare(gelu, definition, (products, bias_f), gradient, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads(implementation, dtype):
    compare_heads((2, 37, 3, 4, 16), dtype, implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gelu(implementation, dtype):
    compare_gelu((2, 37, 300), dtype, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_gradients_of_many_tokens_are_summed_in_float32(implementation):
    """A sum in bfloat16 stops growing at 256 equal terms."""
    tokens = 5000
    bias = jnp.zeros(16)
    ones = jnp.ones((1, tokens, 16), jnp.bfloat16)
    _, pull = jax.vjp(lambda b: biased_gelu(4 * ones, b, implementation=implementation), bias)
    np.testing.assert_allclose(pull(ones)[0], tokens, rtol=2e-3)


def test_a_named_kernel_never_falls_back():
    with pytest.raises(Refused, match="needs an NVIDIA GPU"):
        biased_gelu(jnp.ones((2, 3)), jnp.ones(3), implementation="triton")
    with pytest.raises(Refused, match="power of two"):
        biased_heads(
            *map(jnp.ones, ((1, 2, 3, 4, 24), (3, 4, 24))), implementation=IMPLEMENTATIONS[1]
        )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="slots"):
        biased_heads(jnp.ones((1, 2, 3, 2, 8)), jnp.ones((3, 2, 8)))
    with pytest.raises(ValueError, match=r"\[f\]"):
        biased_gelu(jnp.ones((2, 3)), jnp.ones(4))
    with pytest.raises(ValueError, match="no implementation"):
        biased_gelu(jnp.ones((2, 3)), jnp.ones(3), implementation="cudnn")
