"""An item of the training state of which each shard of `data` holds its own, added by a line in the
table.

What compressed gradients leave for the next step is such a one. It is kept when a run goes on,
and folded on another mesh, or begun anew there.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, batches_of, prepared, tiny

import spmdtrain as st
from spmdtrain.train import all_parts
from spmdtrain.train.all_parts import Feature
from spmdtrain.train.items.item import Item, Start, Taken, per_data_shard
from spmdtrain.train.part import Part
from spmdtrain.train.state import TrainState, bytes_per_device

pytestmark = pytest.mark.long

SETTINGS = ("model.embed=16", "model.vocab=32", "train.sequence_length=8", "guard.policy=skip")
MESH = ("mesh.data=2", "mesh.fsdp=2", "train.zero=1")
TABLE = "tokens.table_ve"  # fsdp splits its second dim, and ZeRO-1 one of its dims over `data`


def begin(start: Start) -> dict[str, jax.Array]:
    shards = start.sizes["data"]
    return {
        TABLE: jnp.zeros((shards, *start.params[TABLE].shape)),
        "steps": jnp.zeros((shards,), jnp.int32),
    }


def update(held: dict[str, jax.Array], taken: Taken) -> dict[str, jax.Array]:
    """Each shard adds the mean of its own tokens."""
    shards = len(held["steps"])
    tokens = taken.batch["tokens"]
    means = tokens.reshape(len(tokens), shards, -1).mean((0, 2))
    return {TABLE: held[TABLE] + means[:, None, None], "steps": held["steps"] + 1}


def evenly(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What the shards held together, in equal parts; integers are the same on each."""
    if leaf.dtype == jnp.int32:
        return jnp.broadcast_to(leaf[0], shape)
    return jnp.broadcast_to(leaf.sum(0) / shape[0], shape)


def most(held: dict[str, jax.Array], taken: Taken) -> jax.Array:  # noqa: ARG001
    return held[TABLE].max()


HELD = Item(
    "held",
    begin=begin,
    rests=per_data_shard,
    update=update,
    figures={"most_held": most},
    fold=evenly,
)


def with_item(monkeypatch, item: Item) -> None:
    part = Part(item.name, items=(item,))
    feature = Feature(lambda _: True, lambda: part, (item.name,))
    monkeypatch.setattr(all_parts, "FEATURES", (*all_parts.FEATURES, feature))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, TrainState]:
    """A run that has kept its state after 2 steps, and that state."""
    with pytest.MonkeyPatch.context() as patch:
        with_item(patch, HELD)
        setup = prepared(*SETTINGS, *MESH)
        step = st.make_step(setup)
        state = st.init_state(setup)
        with batches_of(setup) as ahead:
            for _ in range(2):
                before = state.items["held"][TABLE].max()
                state, metrics = step(state, next(ahead))
        assert metrics["most_held"] == before > 0
        directory = tmp_path_factory.mktemp("held") / "run"
        st.save(setup, state, directory)
    return directory, state


def test_each_shard_of_data_holds_its_own(trained):
    held = trained[1].items["held"]
    setup = prepared(*SETTINGS, *MESH)
    with batches_of(setup) as ahead:
        tokens = np.stack([next(ahead)["tokens"] for _ in range(2)])  # [steps, 1, sequences, time]
    want = [half.mean((1, 2, 3)).sum() for half in np.split(tokens, 2, axis=2)]
    np.testing.assert_allclose(held[TABLE][:, 0, 0], want, rtol=1e-6)
    assert want[0] != want[1]
    shape = held[TABLE].shape
    parts = {shard.data.shape for shard in held[TABLE].addressable_shards}
    assert parts == {(1, shape[1], shape[2] // 2)}, "split as the weight is in use"
    assert bytes_per_device(held) == 4 * shape[1] * shape[2] // 2 + 4


def test_it_is_read_as_it_was_saved(trained, monkeypatch):
    directory, state = trained
    with_item(monkeypatch, HELD)
    assert_same_bits(st.restore(directory, prepared(*SETTINGS, *MESH)), state)


@pytest.mark.parametrize("mesh", [("mesh.data=4",), ("mesh.pipeline=2", "train.microbatch=4")])
def test_on_another_mesh_it_is_folded(mesh, trained, monkeypatch):
    directory, state = trained
    with_item(monkeypatch, HELD)
    held = st.restore(directory, prepared(*SETTINGS, *mesh)).items["held"]
    before = state.items["held"]
    assert len(held["steps"]) != 2 and set(np.asarray(held["steps"])) == {2}
    np.testing.assert_allclose(held[TABLE].sum(0), before[TABLE].sum(0), rtol=1e-6)


def test_one_that_nothing_folds_begins_anew_and_the_run_says_so(trained, monkeypatch, capsys):
    directory, _ = trained
    config = tiny(*SETTINGS, "mesh.data=4", "train.steps=2")
    with_item(monkeypatch, replace(HELD, fold=None))
    st.run(config, directory, devices=jax.devices()[:4])
    assert "held of checkpoint 2 does not fit, and starts from scratch" in capsys.readouterr().out
    held = st.restore(directory, prepared(*SETTINGS, "mesh.data=4")).items["held"]
    assert held[TABLE].shape[0] == 4 and not any(x.any() for x in held.values())


def test_a_run_begins_one_that_its_checkpoint_lacks_and_forgets_one_that_is_no_more(
    trained, monkeypatch
):
    directory, _ = trained
    setup = prepared(*SETTINGS, *MESH)
    assert st.restore(directory, setup).items.keys() == {"recent"}
    with_item(monkeypatch, replace(HELD, name="younger"))
    found = st.restore(directory, prepared(*SETTINGS, *MESH)).items
    assert not found["younger"]["steps"].any() and found.keys() == {"recent", "younger"}
