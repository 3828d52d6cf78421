"""A device that computes wrongly is found by taking a step again with the shards elsewhere."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, prepared, tiny

from spmdtrain.config.errors import ConfigError, CorruptedError
from spmdtrain.running import loop
from spmdtrain.running.guards.other_devices import OtherDevices
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup

SETTINGS = ("model.layers=1", "model.embed=16", "train.global_batch=8", "train.steps=4")
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


class Told:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.events = []

    def event(self, event, step, **values):
        self.events.append((event, step, values))


def making(faulty: int | None, once: list[bool] | None = None):
    """`make(setup)`, whose steps mix all weights with all tokens, after device `faulty` has flipped
    a bit of its shard; only one time if `once` holds True.
    """

    def flipped(x: jax.Array) -> jax.Array:
        shards = []
        for shard in x.addressable_shards:
            bits = np.array(shard.data).view(np.uint32)
            if shard.device.id == faulty:
                bits.flat[0] ^= 1 << 22
            shards.append(jax.device_put(bits.view(x.dtype), shard.device))
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    def make(setup: Setup):
        shardings = jax.tree.map(lambda x: x.sharding, setup.state)

        def step(state, batch):
            mean = sum(jnp.mean(x) for x in state.params.values()) + jnp.mean(batch["mask"])
            params = {path: x + mean for path, x in state.params.items()}
            return replace(state, step=state.step + 1, params=params), {"loss": mean}

        taken = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

        def broken(state, batch):
            if faulty is not None and (once is None or (once and once.pop())):
                path = "blocks.layer.mlp.up_ef"
                state = replace(state, params=state.params | {path: flipped(state.params[path])})
            return taken(state, batch)

        return broken

    return make


@pytest.fixture(scope="module")
def setup() -> Setup:
    return prepared(*SETTINGS, *MESH)


@pytest.fixture(scope="module")
def begin(setup):
    weights = jax.device_get(init_state(setup))
    shardings = jax.tree.map(lambda x: x.sharding, setup.state)
    return lambda: jax.device_put(weights, shardings)


def batch_of(setup: Setup):
    return jax.tree.map(
        lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), setup.batch
    )


@pytest.mark.long
@pytest.mark.parametrize("faulty", [0, 5])
def test_the_faulty_device_is_named(setup, begin, faulty):
    told = Told()
    make = making(faulty)
    step = OtherDevices(setup, make(setup), 2, told, make)
    state, _ = step(begin(), batch_of(setup))
    with pytest.raises(CorruptedError, match=f"step 2 .* device {faulty} "):
        step(state, batch_of(setup))
    assert told.events == [("corrupted", 2, {"devices": [faulty]})]


@pytest.mark.seconds
def test_a_fault_that_does_not_come_again_is_told_without_a_device(setup, begin):
    told = Told()
    once = [True]
    make = making(3, once)
    step = OtherDevices(setup, make(setup), 1, told, make)
    with pytest.raises(CorruptedError, match="does not compute again"):
        step(begin(), batch_of(setup))
    assert told.events == [("corrupted", 1, {"devices": []})]


@pytest.mark.long
def test_a_healthy_run_is_equal_to_the_bit_on_other_devices(tmp_path):
    settings = (*SETTINGS, *MESH, "train.zero=0", "guard.replay_check=2", "checkpoint.every=0")
    outcome = loop.run(tiny(*settings), tmp_path, devices=jax.devices()[: mesh_of(settings)])
    assert outcome.status == "finished"


def test_one_device_has_nobody_to_exchange_with():
    alone = prepared(*SETTINGS)
    with pytest.raises(ConfigError, match="two devices"):
        OtherDevices(alone, making(None)(alone), 1, Told())
