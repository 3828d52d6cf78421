"""The choice of a token: likeliest at temperature 0, never outside top-k or top-p, in proportion
inside.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain.models.sampling import choose

LOGITS = jnp.log(jnp.array([[0.05, 0.4, 0.3, 0.2, 0.05]]))


def drawn(**how) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), 4000)
    ids = jax.vmap(lambda key: choose(LOGITS, key, 1.0, **how)[0])(keys)
    return np.bincount(np.asarray(ids), minlength=5) / len(keys)


def test_temperature_zero_takes_the_likeliest():
    assert int(choose(LOGITS, jax.random.key(0), 0.0)[0]) == 1


def test_draws_follow_the_probabilities():
    np.testing.assert_allclose(drawn(), [0.05, 0.4, 0.3, 0.2, 0.05], atol=0.03)


def test_top_k_keeps_the_k_likeliest_in_proportion():
    np.testing.assert_allclose(drawn(top_k=2), [0, 4 / 7, 3 / 7, 0, 0], atol=0.03)


def test_top_p_keeps_the_fewest_that_reach_p():
    np.testing.assert_allclose(drawn(top_p=0.65), [0, 4 / 7, 3 / 7, 0, 0], atol=0.03)
    np.testing.assert_allclose(drawn(top_p=0.75), [0, 4 / 9, 3 / 9, 2 / 9, 0], atol=0.03)


def test_a_low_temperature_sharpens():
    cold = jax.vmap(lambda key: choose(LOGITS, key, 0.2)[0])(
        jax.random.split(jax.random.key(0), 1000)
    )
    assert np.mean(np.asarray(cold) == 1) > 0.75


@pytest.mark.seconds
def test_top_k_and_top_p_take_no_more_of_equally_likely_tokens_than_asked():
    """The first ones, as the likeliest is the first: top_k=1 is greedy."""
    ties = jnp.log(jnp.array([[0.1, 0.3, 0.3, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 200)
    for how, wanted in (
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.5}, {1, 2}),
    ):
        ids = jax.vmap(lambda key, how=how: choose(ties, key, 1.0, **how)[0])(keys)
        assert set(np.asarray(ids).tolist()) == wanted
    assert int(choose(ties, keys[0], 0.0)[0]) == 1
