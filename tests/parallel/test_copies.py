"""A weight's copies give the matmul and the gradient of the weight alone.

test_layouts.py shows what they are for: training as on one device, and sums once a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import prepared
from jax.sharding import PartitionSpec as P

from spmdtrain.parallel.copies import Copies, copies_of, multiply_copies
from spmdtrain.parallel.reduce import Reduction

FOUR = Copies(("context",), 4, 1)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "contracted"),
    [((3, 8, 5), (5, 2, 7), 1), ((3, 8, 2, 7), (2, 7, 5), 2)],
    ids=["column", "row"],
)
def test_each_copy_multiplies_its_part_of_the_tokens(x_shape, weight_shape, contracted):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], x_shape)
    weight = jax.random.normal(keys[1], weight_shape)
    copies = jnp.broadcast_to(weight, (4, *weight_shape))

    def gradient(multiply, x, weight):
        def total(weight):
            return jnp.sum(jnp.sin(multiply(x, weight, contracted)))

        return jax.grad(total)(weight)

    want = jnp.tensordot(x, weight, contracted)
    np.testing.assert_allclose(multiply_copies(x, copies, contracted), want, rtol=1e-5, atol=1e-5)
    of_copies = gradient(multiply_copies, x, copies)
    for part in range(4):
        want = gradient(jnp.tensordot, x[:, 2 * part : 2 * part + 2], weight)
        np.testing.assert_allclose(of_copies[part], want, rtol=1e-5, atol=1e-5)


def test_the_dim_of_the_copies_stands_behind_the_dims_of_the_layers():
    assert FOUR.spec(P("pipeline", "data", "tensor")) == P("pipeline", "context", "data", "tensor")
    scatter = Reduction(("data",), (("fsdp", 0), ("fsdp", 1), ("fsdp", 2)))
    assert FOUR.reduction(scatter) == Reduction(("data",), (("fsdp", 0), ("fsdp", 2), ("fsdp", 3)))
    doubled = FOUR.map(lambda x: jnp.pad(x, [(0, 0), (0, 2)]), jnp.ones((2, 4, 3)))
    assert doubled.shape == (2, 4, 5)


def test_copies_are_of_the_axes_that_split_tokens_and_not_the_weight():
    rules = prepared("mesh.context=2", "mesh.tensor=2").rules
    assert copies_of(rules, P(None, "tensor")) == Copies(("context",), 2, 0)
    assert copies_of(rules, P("context", "tensor"), 1) == Copies()
    assert copies_of(prepared("mesh.tensor=2").rules, P(None, "tensor")) == Copies()


@pytest.mark.parametrize(
    ("mesh", "copied"),
    [
        (("mesh.data=2", "mesh.context=2"), 4),
        (("mesh.fsdp=2", "mesh.context=2"), 0),  # layers scatter the gradients themselves
        (("mesh.pipeline=2", "mesh.fsdp=2", "mesh.context=2"), 4),
        (("mesh.data=2",), 0),
    ],
)
def test_matmuls_have_copies_where_their_gradients_can_wait(mesh, copied):
    copies = prepared(*mesh).copies
    assert sum(bool(each.axes) for each in copies.values()) == copied
