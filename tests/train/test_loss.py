"""Chunked cross-entropy equals the plain definition, values and gradients, and never holds all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.train.loss import chunks_needed, cross_entropy

B, T, E, V = 4, 12, 8, 50


def draw():
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, table = jax.random.normal(keys[0], (B, T, E)), jax.random.normal(keys[1], (V, E))
    targets = jax.random.randint(keys[2], (B, T), 0, V)
    mask = (jax.random.uniform(keys[3], (B, T)) < 0.7).astype(jnp.float32)
    return hidden, table, targets, mask


def plain(hidden, table, targets, mask):
    log_probability = jax.nn.log_softmax(hidden @ table.T)
    return -jnp.sum(jnp.take_along_axis(log_probability, targets[..., None], -1)[..., 0] * mask)


@pytest.mark.parametrize(
    "limit", [B * T * V, B * T * V // 3, 1], ids=["one chunk", "three chunks", "a chunk per token"]
)
def test_chunked_cross_entropy_equals_the_definition(limit):
    hidden, table, targets, mask = draw()
    function = lambda h, w: cross_entropy(h, w, targets, mask, limit=limit)  # noqa: E731
    got, got_grads = jax.value_and_grad(function, (0, 1))(hidden, table)
    want, want_grads = jax.value_and_grad(lambda h, w: plain(h, w, targets, mask), (0, 1))(hidden, table)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for ours, theirs in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_chunks_are_equal_and_as_few_as_the_limit_allows():
    assert chunks_needed(4, 12, 50, 4 * 12 * 50) == 1
    assert chunks_needed(4, 12, 50, 4 * 12 * 50 - 1) == 2
    assert chunks_needed(4, 12, 50, 4 * 5 * 50) == 3  # 5 tokens would fit, but 12 is not divisible by 12 / 5
    assert chunks_needed(4, 7, 50, 4 * 3 * 50) == 7
    assert chunks_needed(4, 12, 50, 1) == 12


def test_large_logits_never_exist_whole():
    hidden = jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)
    table, ids = jax.ShapeDtypeStruct((4096, 16), jnp.float32), jax.ShapeDtypeStruct((2, 64), jnp.int32)
    mask = jax.ShapeDtypeStruct((2, 64), jnp.float32)

    def temp(limit):
        grad = jax.grad(lambda h, w, t, m: cross_entropy(h, w, t, m, limit=limit), (0, 1))
        return jax.jit(grad).lower(hidden, table, ids, mask).compile().memory_analysis().temp_size_in_bytes

    logits = 2 * 64 * 4096 * 4
    assert temp(2 * 64 * 4096) > logits
    assert temp(2 * 4 * 4096) < logits / 2
