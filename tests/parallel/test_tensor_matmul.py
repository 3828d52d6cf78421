"""A matmul whose arrays are whole on each device is one of two matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.parallel.tensor_matmul import local_tensordot

SHAPES = [((3, 8, 5), (5, 2, 7), 1), ((3, 8, 2, 7), (2, 7, 5), 2)]


@pytest.mark.parametrize(("x_shape", "weight_shape", "contracted"), SHAPES, ids=["column", "row"])
def test_it_is_a_tensordot(x_shape, weight_shape, contracted):
    x = jax.random.normal(jax.random.key(0), x_shape)
    weight = jax.random.normal(jax.random.key(1), weight_shape)

    def results(dot, x, weight):
        y, pull = jax.vjp(lambda *arrays: dot(*arrays, contracted), x, weight)
        return y, *pull(jnp.sin(y))

    got, want = (results(dot, x, weight) for dot in (local_tensordot, jnp.tensordot))
    for each, true in zip(got, want, strict=True):
        np.testing.assert_allclose(each, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dot", "transposes"), [(local_tensordot, 0), (jnp.tensordot, 1)])
def test_the_gradient_of_a_weight_transposes_no_operand(dot, transposes):
    x, weight = jnp.ones((4, 16, 32)), jnp.ones((32, 64))

    def gradient(x, weight, dy):
        _, pull = jax.vjp(lambda weight: dot(x, weight, 1), weight)
        return pull(dy)

    text = jax.jit(gradient).lower(x, weight, jnp.ones((4, 16, 64))).compile().as_text()
    assert len([line for line in text.splitlines() if " transpose(" in line]) == transposes, text
