"""A run takes the kernels that its machine has measured, and keeps them when it is resumed."""

import json
from types import SimpleNamespace

import jax
import pytest
from helpers import tiny

from pallas_kernels.chosen import in_force
from pallas_kernels.norm import triton
from pallas_kernels.tuning import Table
from spmdtrain.config import CheckpointError, ConfigError
from spmdtrain.running import loop
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.start import kernels
from spmdtrain.train.shard import shard

SETTINGS = (
    "model.layers=1",
    "model.embed=16",
    "model.heads=1",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=1",
    "optimizer.schedule=constant",
)
OURS = "triton:interpret"  # an implementation that this machine can run, besides XLA's


def run(directory, steps, *settings):
    config = tiny(*SETTINGS, f"train.steps={steps}", *settings)
    return loop.run(config, directory, devices=jax.devices()[:1])


def implementations(directory):
    text = (directory / "config.json").read_text(encoding="utf-8")
    found = json.loads(text)["implementations"]
    assert found["device"] == "cpu"
    return found["calls"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table that says that norms are fastest by `OURS` here."""
    monkeypatch.setenv("PALLAS_KERNELS_CACHE", str(tmp_path / "cache"))
    setup = shard(tiny(*SETTINGS), devices=jax.devices()[:1])
    norms = [call.name for call in kernels.calls_of_step(setup) if "norm" in call.name]
    assert norms
    made = Table()
    made.add("cpu", {name: {"implementation": OURS} for name in norms})
    return made


@pytest.mark.long
def test_a_resumed_run_keeps_its_kernels_or_is_refused(tmp_path, table, monkeypatch):
    run(tmp_path / "run", 1)
    first = implementations(tmp_path / "run")
    assert {name: name.startswith("attention") for name in first} == {
        name: taken == "xla" for name, taken in first.items()
    }
    assert set(first.values()) == {"xla", OURS}
    table.add("cpu", {name: {"implementation": "xla"} for name in first})
    run(tmp_path / "run", 2)
    assert implementations(tmp_path / "run") == first, "whatever the table says now"
    monkeypatch.setattr(triton, "refusal", lambda *_: "it is gone")
    with pytest.raises(CheckpointError) as refused:
        run(tmp_path / "run", 3)
    said = str(refused.value)
    assert said.startswith(f"a kernel of step 2 of {tmp_path / 'run'} cannot run here: {OURS}: it")
    assert "kernels.tune=again" in said and "layernorm float32" in said
    run(tmp_path / "run", 3, "kernels.tune=again")
    assert set(implementations(tmp_path / "run").values()) == {"xla"}


@pytest.mark.seconds
def test_each_trace_takes_decisions_of_its_own():
    """Also inside what is recomputed: jax keeps the trace of a function, with its kernels."""
    sizes = ("delta.key_heads=1", "delta.value_heads=1", "delta.key_dim=4", "delta.value_dim=4")
    sizes += ("ssd.heads=2", "ssd.head_dim=4", "ssd.state=3", "conv.taps=2")
    mixers = ("model.layers=4", "model.mixers=['delta', 'both', 'conv', 'attention']")
    settings = (*SETTINGS, *mixers, *(f"model.{size}" for size in sizes))
    setup = shard(tiny(*settings), devices=jax.devices()[:1])
    first, second = ({call.name for call in kernels.calls_of_step(setup)} for _ in range(2))
    assert {name.partition(" ")[0] for name in first} >= {"chunk_scan", "unit_inverse", "attention"}
    assert second == first


def taken(*settings):
    setup = shard(tiny(*SETTINGS, *settings), devices=jax.devices()[:1])
    with kernels.decided(setup):
        lower_step(setup)
        return setup, set(kernels.document(setup)["kernels"]["calls"].values())


@pytest.mark.seconds
def test_off_knows_no_table_and_a_damaged_one_is_named(table):
    assert taken()[1] == {"xla", OURS}
    assert taken("kernels.tune=off")[1] == {"xla"}
    table.path.write_text("{", encoding="utf-8")
    setup, names = taken()
    assert names == {"xla"}
    assert f"kernels: {table.path} is damaged and ignored" in setup.config.notes


def test_kernels_are_not_kept_on_another_kind_of_device():
    setup = shard(tiny(*SETTINGS), devices=jax.devices()[:1])
    with kernels.decided(setup):
        meta = {"kernels": {"device": "NVIDIA H100", "calls": {"one": "mosaic"}}}
        assert kernels.keep(meta, setup) == {}
        meta = {"kernels": {"device": "cpu", "calls": {"one": "mosaic"}}}
        assert kernels.keep(meta, setup) == {"one": "mosaic"}
        assert kernels.keep({}, setup) == {}


def test_all_processes_take_the_table_of_process_0(monkeypatch):
    setup = shard(tiny(*SETTINGS), devices=jax.devices()[:1])
    monkeypatch.setattr(kernels, "gather_texts", lambda mine: ['{"one": "mosaic"}', mine])
    with kernels.decided(setup):
        assert in_force().chosen == {"one": "mosaic"}


def test_devices_of_several_generations_are_refused():
    setup = shard(tiny(*SETTINGS), devices=jax.devices()[:1])
    kinds = ("NVIDIA H100", "NVIDIA A100-SXM4-80GB")
    devices = SimpleNamespace(flat=[SimpleNamespace(device_kind=kind) for kind in kinds])
    mixed = SimpleNamespace(mesh=SimpleNamespace(devices=devices), config=setup.config)
    with (
        pytest.raises(ConfigError, match="several generations.*A100.*H100"),
        kernels.decided(mixed),
    ):
        pass
