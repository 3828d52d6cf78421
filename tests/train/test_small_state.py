"""Optimizer state and weights of few bits: right on average, and trained as in float32, nearly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.parallel.padding import Padding
from spmdtrain.train.updates.optimizers import Rule, apply
from spmdtrain.train.updates.stochastic_rounding import stochastic_bfloat16
from spmdtrain.train.updates.transformations.small_moments import Few, decoded, encoded, in_8_bits

EIGHT = "optimizer.moment_dtype=8bit"
STOCHASTIC = ("precision.params=bfloat16", "precision.rounding=stochastic")
FEW = ("train.steps=6", "optimizer.warmup=0", "optimizer.schedule=constant")


def drawn(count, function):
    return jax.vmap(function)(jax.random.split(jax.random.key(3), count))


def test_stochastic_rounding_is_right_on_average_and_keeps_what_bfloat16_has():
    x = jnp.float32([1 + 2**-10, -3.3, 1e-30, 0.0, 1.5, jnp.inf, -jnp.inf, jnp.nan])
    rounded = np.asarray(drawn(10_000, lambda key: stochastic_bfloat16(x, key)), np.float64)
    exact = np.asarray(x, np.float64)
    assert np.array_equal(rounded[0][3:], exact[3:], equal_nan=True)
    assert all(len(np.unique(rounded[:, at])) == 2 for at in range(3))
    error = rounded[:, :3].std(0) / 10_000**0.5
    assert np.all(np.abs(rounded[:, :3].mean(0) - exact[:3]) < 4 * error)


@pytest.mark.parametrize(("name", "spacing"), [("mu", 1 / 127), ("nu", 0.1)])
@pytest.mark.seconds
def test_a_moment_in_8_bits_is_near_and_right_on_average(name, spacing):
    x = jax.random.normal(jax.random.key(0), (3, 512)).at[0, :256].set(0)
    x = jnp.square(x) if name == "nu" else x
    few = encoded(name, x, None)
    assert few.codes.shape == x.shape
    assert few.codes.dtype.itemsize == 1
    assert few.scales.shape == (3, 2)
    back = decoded(name, few)
    assert not np.any(back[0, :256]), "a moment of zero stays zero"
    unit = np.repeat(few.scales, 256, 1) if name == "mu" else x
    assert np.all(np.abs(back - x) <= 0.51 * spacing * unit)
    many = drawn(4000, lambda key: decoded(name, encoded(name, x, key)))
    error = np.maximum(many.std(0) / 4000**0.5, 1e-6)
    assert np.all(np.abs(many.mean(0) - x) < 6 * error)
    # All of them together: a tenth of a percent too much in each step adds up over steps.
    shares = np.float64(many[:, 1:] - x[1:]) / np.asarray(unit)[1:]
    assert abs(shares.mean()) < 6 * shares.std() / shares.size**0.5


@pytest.mark.seconds
def test_a_momentum_and_its_squares_are_rounded_independently():
    """Updates would have a mean of their own if one went up where the other goes down."""
    adam = optax.scale_by_adam(0.9, 0.95)
    rule = in_8_bits(adam, 7)
    x = jnp.zeros((64, 256))
    gradient = jax.random.normal(jax.random.key(0), x.shape)
    _, exact = adam.update(gradient, adam.init(x), x)
    _, state = rule.update(gradient, rule.init(x), x)
    errors = [
        np.asarray((decoded(name, getattr(state.inner, name)) - whole) / whole.max()).ravel()
        for name, whole in (("mu", exact.mu), ("nu", exact.nu))
    ]
    assert abs(np.corrcoef(*errors)[0, 1]) < 5 / x.size**0.5


@pytest.mark.seconds
def test_squares_too_small_for_a_block_are_not_zero():
    """Zero would make the update as large as its momentum over epsilon."""
    x = jnp.float32([1.0, 1e-20])
    assert decoded("nu", encoded("nu", x, None))[1] > 0


def test_a_number_that_is_not_finite_is_seen():
    for name in ("mu", "nu"):
        for bad in (np.nan, np.inf):
            x = jnp.ones((2, 4)).at[1, 2].set(bad)
            assert not np.all(
                np.isfinite(jax.jit(lambda x, n=name: decoded(n, encoded(n, x, None)))(x))
            )


@pytest.mark.seconds
def test_a_weight_without_a_gradient_stays_for_a_thousand_steps():
    """Beside others that have one, and after a first step in which it had one."""
    rule = in_8_bits(optax.scale_by_adam(0.9, 0.95), 7)
    x = jnp.ones((2, 8))
    first = jnp.full((2, 8), 1e-3).at[0, 0].set(1.0)

    @jax.jit
    def step(state, number):
        later = jnp.zeros((2, 8)).at[0, 0].set(1.0)
        update, state = rule.update(jnp.where(number == 0, first, later), state, x)
        return state, update

    state, found = jax.lax.scan(step, rule.init(x), jnp.arange(1000))
    assert isinstance(state.inner.mu, Few)
    assert not np.any(found[200:, 0, 1:]), "what is left of a momentum is rounded away"
    assert np.all(np.abs(found[400:, 1]) < 1e-6), "or decays, where all of a block has it"
    assert np.all(found[200:, 0, 0] > 0.5)


def state_after(*settings: str):
    setup = st.shard(tiny(*FEW, *settings), devices=jax.devices()[: mesh_of(settings)])
    state, step = st.init_state(setup), st.make_step(setup)
    with batches_of(setup) as ahead:
        for _ in range(3):
            state, metrics = step(state, next(ahead))
    return setup, state, float(metrics["loss"])


@pytest.mark.long
def test_bytes_and_the_first_losses_are_as_promised():
    _, wide, wanted = state_after()
    setup, few, found = state_after(EIGHT, *STOCHASTIC)

    def bytes_of(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    weights = setup.model.size
    assert bytes_of(wide.params) + bytes_of(wide.opt_state) == pytest.approx(12 * weights, rel=0.01)
    # 2 of a weight, 1 of a moment, and a scale for each 64 or, in heads, each 16 of this model.
    assert bytes_of(few.params) + bytes_of(few.opt_state) == pytest.approx(4.35 * weights, rel=0.03)
    assert found == pytest.approx(wanted, rel=5e-3)


@pytest.mark.long
def test_no_mesh_changes_how_weights_and_moments_are_rounded():
    """But where the rounding of a sum decides: all the gradient that a key's bias has."""
    _, one, _ = state_after(EIGHT, *STOCHASTIC)
    _, split, _ = state_after(EIGHT, *STOCHASTIC, "mesh.tensor=2")
    same = [
        x == jax.device_get(split.params[path])
        for path, x in jax.device_get(one.params).items()
        if "qkv_bias" not in path
    ]
    assert np.mean(np.concatenate([each.ravel() for each in same])) > 0.995


def test_padding_changes_no_draw_of_stochastic_rounding():
    """A dim that a mesh pads would shift the places of all elements after it."""
    x = jax.random.normal(jax.random.key(0), (3, 5, 7), jnp.bfloat16)
    update = jax.random.normal(jax.random.key(1), x.shape) * 1e-3
    rules = {"w": Rule(optax.identity())}
    key, rate = jax.random.key(2), jnp.float32(1)
    wanted = apply(rules, {"w": x}, {"w": update}, rate, key)["w"]
    padding = Padding({"w": x.shape}, {"w": x.shape}, {"w": (3, 8, 8)})
    at_rest = [{"w": padding.to_rest("w", each)} for each in (x, update)]
    got = apply(rules, *at_rest, rate, key, padding)["w"]
    assert got.shape == (3, 8, 8)
    assert np.array_equal(padding.from_rest("w", got), wanted)


@pytest.mark.long
def test_zero_1_has_the_moments_of_one_device():
    """But for those where the rounding of a sum over `data` decides."""
    _, one, _ = state_after(EIGHT)
    _, split, _ = state_after(EIGHT, "mesh.data=2", "train.zero=1", "train.microbatch=4")
    for path in one.params:
        if "qkv_bias" in path:
            continue
        leaves = zip(
            *(jax.tree.leaves(state.opt_state[path]) for state in (one, split)), strict=True
        )
        for mine, other in leaves:
            if mine.dtype.itemsize == 1:
                assert np.mean(np.asarray(mine) == np.asarray(other)) > 0.98, path


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("optimizer.name=adafactor", EIGHT), "keeps no separate moments"),
        (("optimizer.name=schedule_free_adamw", EIGHT), "keeps no separate moments"),
        (("optimizer.moment_dtype=bfloat16", "optimizer.beta2=0.999"), "loses a change"),
        (("precision.rounding=stochastic",), "belongs to bfloat16"),
    ],
)
def test_what_would_not_work_is_refused(settings, what):
    with pytest.raises(ConfigError, match=what):
        tiny(*settings)
