"""Matmuls in 8-bit floats by given scales: those of current scaling where the scales are, and the
largest magnitudes as the gradient of slots.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.parallel.matmuls import delayed, float8
from spmdtrain.parallel.matmuls.delayed import Cut, Operand
from spmdtrain.parallel.matmuls.float8 import GRADIENTS, VALUES

# x [b, t, i, j], w [i, j, o], dy [b, t, o]: tokens in two parts, i or o in three.
CUT = Cut(x=(1, 2, 3), y=(1, 2, 1))
TIMES, WIDE = 4, 6


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(2), 3)
    shapes = ((3, TIMES, WIDE, 2), (WIDE, 2, 5), (3, TIMES, 5))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def scales_of(x, w, dy) -> jax.Array:
    of_each = ((x, VALUES), (w, VALUES), (dy, GRADIENTS))
    return jnp.stack([float8.scale_of(jnp.abs(each).max(), dtype) for each, dtype in of_each])


@partial(jax.jit, static_argnums=4)
def multiplied(x, w, dy, scales, parts: tuple[int, int]):
    """(product, gradients of x, of the weight and of the slots)."""
    operand = Operand(w, scales, jnp.zeros((*parts, 2)))
    y, backward = jax.vjp(lambda x, operand: delayed.tensordot(x, operand, 2, CUT), x, operand)
    dx, of_operand = backward(dy)
    return y, dx, of_operand.weight, of_operand.slots


@pytest.mark.seconds
def test_with_the_scales_of_the_arrays_it_is_current_scaling():
    x, w, dy = arrays()
    y, dx, dw, _ = multiplied(x, w, dy, scales_of(x, w, dy), (2, 3))
    want, backward = jax.vjp(lambda x, w: float8.tensordot(x, w, 2), x, w)
    for got, wanted in zip((y, dx, dw), (want, *backward(dy)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parts", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_slots_have_the_largest_magnitude_of_each_part(parts):
    """A part that is cut otherwise is whole: all its slots have the same."""
    x, w, dy = arrays()
    slots = np.asarray(multiplied(x, w, dy, jnp.ones(3), parts)[3])
    times, wide = (np.split(np.arange(n), p) for n, p in zip((TIMES, WIDE), parts, strict=True))
    for c, p in np.ndindex(parts):
        assert slots[c, p, 0] == np.abs(x)[:, times[c]][:, :, wide[p]].max()
        assert slots[c, p, 1] == np.abs(dy)[:, times[c]].max()


def test_what_is_beyond_a_scale_saturates():
    x, w, dy = arrays()
    scales = scales_of(x, w, dy)
    beyond = x.at[1, 2, 3, 0].set(100.0)
    clipped = x.at[1, 2, 3, 0].set(jnp.abs(x).max())
    found = multiplied(beyond, w, dy, scales, (1, 1))
    for got, want in zip(found[:3], multiplied(clipped, w, dy, scales, (1, 1))[:3], strict=True):
        np.testing.assert_array_equal(got, want)
    assert found[3][0, 0, 0] == 100


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_product_and_is_no_magnitude(bad):
    x, w, dy = arrays()
    scales = scales_of(x, w, dy)
    y, _, dw, slots = multiplied(x.at[1, 2, 3, 0].set(bad), w, dy, scales, (1, 1))
    assert np.isnan(y[1, 2]).all() and np.isfinite(y[0]).all()
    assert np.isnan(dw).any() and np.isfinite(slots).all()
    _, dx, dw, slots = multiplied(x, w, dy.at[1, 2, 3].set(bad), scales, (1, 1))
    assert np.isnan(dx).any() and np.isnan(dw).any() and np.isfinite(slots).all()
