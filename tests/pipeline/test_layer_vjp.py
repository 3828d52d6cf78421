"""A layer's gradient in parts equals jax's in one, and keeps no more than it must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.pipeline.layer_vjp import LayerGradient

WIDTH, ROWS = 8, 4


def layer(weights, x, rest):
    """A matmul of weights that are not used as they are, dropout, a mask, a jitted matmul, and a
    side loss.
    """
    number, key, segments = rest
    hidden = jax.nn.gelu(x @ (jnp.tanh(weights["up"]) * 2))
    keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, hidden.shape)
    scores = jnp.where(segments[:, None] == segments[None], x @ x.T, -1e9)
    mixed = jax.nn.softmax(scores) @ jnp.where(keep, hidden, 0)
    return x + jax.jit(jnp.matmul)(mixed, weights["down"]) * weights["scale"], 0.1 * jnp.sum(
        mixed**2
    )


def dots(weights, x, rest):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)(weights, x, rest)


@pytest.fixture
def given():
    up, down, x, dy = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(WIDTH, 16), (16, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH)])
    )
    weights = {"up": up, "down": down, "scale": jnp.linspace(0.5, 1.5, WIDTH)}
    return (
        weights,
        x,
        (jnp.int32(3), jax.random.key(5), jnp.array([0, 0, 1, 1])),
        dy,
        jnp.float32(1),
    )


def close(got, want):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(ours - theirs)) <= 1e-5 * np.max(np.abs(theirs))


@pytest.mark.parametrize("function", [layer, dots])
@pytest.mark.seconds
def test_whole_and_split_backward_equal_jax_vjp(function, given):
    weights, x, rest, dy, dside = given
    gradient = LayerGradient(function, weights, x, rest, split=True)
    (y, side), pull = jax.vjp(lambda weights, x: function(weights, x, rest), weights, x)
    got_y, got_side, kept = jax.jit(gradient.forward)(weights, x, rest)
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [
        (leaf.shape, leaf.dtype) for leaf in gradient.saved
    ]
    dweights, dx = pull((dy, dside))
    close((got_y, got_side), (y, side))
    close(jax.jit(gradient.backward)(weights, rest, kept, dy, dside), (dweights, dx))
    got_dx, deferred = jax.jit(gradient.input_gradient)(weights, rest, kept, dy, dside)
    assert [leaf.shape for leaf in deferred] == [leaf.shape for leaf in gradient.deferred]
    close(
        (jax.jit(gradient.weight_gradient)(weights, rest, kept, deferred), got_dx), (dweights, dx)
    )


def test_what_does_not_follow_from_x_is_not_kept(given):
    """Neither weights, nor what is made of them, nor the dropout and segment masks."""
    weights, x, rest, _, _ = given
    kept = LayerGradient(layer, weights, x, rest).saved
    shapes = [leaf.shape for leaf in kept]
    assert (WIDTH, 16) not in shapes
    assert (16, WIDTH) not in shapes
    assert not any(leaf.dtype == bool for leaf in kept)
    small = sum(np.prod(leaf.shape) for leaf in LayerGradient(dots, weights, x, rest).saved)
    assert small < sum(np.prod(shape) for shape in shapes)


@pytest.mark.seconds
def test_the_split_puts_matmuls_of_weights_last_and_no_others(given):
    """Of the six matmuls of the backward, two make weight gradients; the split defers three
    cotangents for them.
    """
    weights, x, rest, dy, dside = given
    gradient = LayerGradient(layer, weights, x, rest, split=True)
    _, _, kept = gradient.forward(weights, x, rest)

    def matmuls(function, *arguments):
        return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")

    whole = matmuls(gradient.backward, weights, rest, kept, dy, dside)
    early = matmuls(gradient.input_gradient, weights, rest, kept, dy, dside)
    _, deferred = gradient.input_gradient(weights, rest, kept, dy, dside)
    late = matmuls(gradient.weight_gradient, weights, rest, kept, deferred)
    assert (early, late) == (whole - 2, 2)
    assert len(deferred) <= 3
