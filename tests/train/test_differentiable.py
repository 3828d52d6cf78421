"""The loss of a batch, as jax differentiates it, has the gradients of the step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES, assert_same_bits, batches_of, prepared

import spmdtrain as st
from spmdtrain.config import ConfigError


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.seconds
def test_the_derivative_of_the_loss_is_what_the_step_subtracts(mesh):
    """With plain gradient descent at a rate of 1."""
    plain = ("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0")
    rates = ("optimizer.learning_rate=1.0", "optimizer.warmup=0", "optimizer.schedule=constant")
    setup = prepared(*plain, *rates, "train.clip=none", "train.z_loss=0.01", *MESHES[mesh])
    state = st.init_state(setup)
    before = jax.device_get(state.params)
    with batches_of(setup) as ahead:
        batch = next(ahead)
    loss = st.make_loss(setup)
    value, gradients = jax.value_and_grad(loss)(state.params, batch)
    after, metrics = st.make_step(setup)(state, batch)
    total = metrics["loss"] + metrics.get("z_loss", 0)
    assert float(value) == pytest.approx(float(total), rel=1e-6)
    for path, x in before.items():
        moved = x - np.asarray(after.params[path])
        np.testing.assert_allclose(gradients[path], moved, rtol=1e-4, atol=1e-6, err_msg=path)


def changed_by_hand(setup: st.Setup) -> st.TrainState:
    from dataclasses import replace

    state = st.init_state(setup)
    params = {path: 0.5 * x for path, x in state.params.items()}
    return replace(state, params=params, step=jnp.int32(3))


@pytest.mark.seconds
def test_what_was_changed_by_hand_is_kept_and_trained(tmp_path):
    setup = prepared("train.steps=5", "eval.every=0", "model.vocab=64")
    setup = st.shard(st.open_data(setup.config)[0], devices=jax.devices()[:1])
    state = changed_by_hand(setup)
    before = jax.device_get(state)
    st.save(setup, state, tmp_path / "saved")
    for path, x in st.weights(tmp_path / "saved").items():
        assert np.array_equal(x, before.params[path])
    assert_same_bits(st.restore(tmp_path / "saved", setup), before)
    config, devices = setup.config, jax.devices()[:1]
    went_on = st.run(config, tmp_path / "saved", devices=devices)
    began = st.run(config, tmp_path / "given", devices=devices, state=state)
    assert went_on == began and began.step == 5
    assert_same_bits(st.restore(tmp_path / "saved", setup), st.restore(tmp_path / "given", setup))
    assert_same_bits(state, before)
    with pytest.raises(st.UserError, match="holds step 5 already, but step 3 was asked for|step 5"):
        st.save(setup, state, tmp_path / "saved")
    with pytest.raises(ConfigError, match="holds step 5"):
        st.run(config, tmp_path / "saved", devices=devices, state=state)


def test_a_state_or_a_batch_of_another_kind_is_one_line(tmp_path):
    from dataclasses import replace

    setup = prepared()
    state = st.init_state(setup)
    path, x = next(iter(state.params.items()))
    wrong = {
        "not a TrainState": state.params,
        f"the state has no params['{path}']": replace(state, params={}),
        "of the state is float32": replace(state, params=state.params | {path: x[:1]}),
        "of the state is float16": replace(
            state, params=state.params | {path: x.astype(jnp.float16)}
        ),
        "does not belong to this setup": replace(state, params=state.params | {"more": x}),
    }
    for said, given in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            st.save(setup, given, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    batch = {name: np.zeros(x.shape, x.dtype) for name, x in setup.batch.items()}
    wrong = {
        "a batch is a dict": None,
        "the batch has no 'targets'": {"tokens": batch["tokens"], "mask": batch["mask"]},
        "batch['tokens'] is int32 (16, 16)": batch | {"tokens": batch["tokens"][0]},
        "batch['tokens'] is float32": batch | {"tokens": batch["mask"]},
    }
    for said, given in wrong.items():
        for function in (st.make_loss(setup), st.make_gradients(setup)):
            with pytest.raises(ConfigError, match=re.escape(said)):
                function(state.params, given)
        with pytest.raises(ConfigError, match=re.escape(said)):
            st.make_step(setup)(state, given)
