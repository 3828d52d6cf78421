"""The memory formula against the real step compiled for GPUs that are not there.

benchmarks/planner/memory.py compares more layouts.
"""

import importlib.util

import jax
import pytest
from compiled_estimates import compiled_estimate
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmdtrain.compiled.step_memory import memory_in
from spmdtrain.config import ConfigError, RunConfig
from spmdtrain.planner import deviceless, report
from spmdtrain.planner.cost.hardware import DEVICES
from spmdtrain.planner.cost.memory import Memory

pytestmark = pytest.mark.long

SMALL = """
[model]
layers = 4
embed = 512
heads = 8
vocab = 8192
[train]
global_batch = 16
microbatch = 1
sequence_length = 512
[precision]
compute = "bfloat16"
"""
LAYOUTS = [
    ("mesh.data=8", "train.zero=1", "train.remat=dots"),
    ("mesh.fsdp=4", "mesh.tensor=2", "train.remat=full"),
    ("mesh.tensor=8", "train.remat=none", "rules.activations.stream_time=context,tensor"),
    ("mesh.pipeline=4", "mesh.data=2"),
    (
        "mesh.pipeline=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
    ),
]
plugin = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin"
)


@plugin
@pytest.mark.parametrize("settings", LAYOUTS)
def test_total_memory(settings, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    found = compiled_estimate([str(path), "--hardware", "h100"], settings)
    held = memory_in(found["compiled"]).held
    assert found["memory_bytes_per_device"]["total"] == pytest.approx(held, rel=0.2)
    assert found["compiled"]["collectives"]


@plugin
@pytest.mark.parametrize("hardware", ["a100-80", "h100"])
def test_the_pieces_of_a_collective_matmul_travel_beside_matmuls(hardware, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    settings = (
        "mesh.tensor=8",
        "train.remat=full",
        "rules.activations.stream_time=context,tensor",
        "mesh.collective_matmul=true",
    )
    found = compiled_estimate([str(path), "--hardware", hardware], settings)
    traffic = found["compiled"]["traffic"]
    pieces = [each for each in traffic if each["kind"] == "collective-permute"]
    assert total(pieces, "sent") > 0
    assert total(pieces, "sent_beside_work") > 0.9 * total(pieces, "sent")

    # The predicted step counts with what this very step hides.
    share = total(traffic, "sent_beside_work") / total(traffic, "sent")
    assert {each["axis"] for each in traffic} == {"tensor"}
    assert found["overlap"]["collective_matmul"] == pytest.approx(share)


def total(traffic: list[dict], key: str) -> float:
    return sum(each[key] for each in traffic)


def test_a_loop_of_unknown_length_costs_what_crosses_the_network_and_no_more(monkeypatch):
    mesh = Mesh(jax.devices()[:2], ("data",))

    def summed(x):
        return jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: jax.lax.psum(y, "data") / 3, x)

    region = jax.shard_map(
        summed, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    made = jax.jit(region).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
    monkeypatch.setattr(deviceless, "executable", lambda *_: (made, mesh))
    found = deviceless.compile_step(RunConfig(), {}, DEVICES["h100"])
    assert found["traffic"] is found["overlap"] is None
    text = report.compiled_text(found, Memory(1, 1, 1, 1, 1, 1), {})
    assert "is unknown: nothing states how often the loop around" in text
    assert "all-reduce" in text


def test_without_the_compiler_there_is_one_line(monkeypatch):
    def missing(**_):
        raise RuntimeError("no such plugin")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(
        ConfigError, match="cannot compile for h100 here: no such plugin; try make cuda-compiler"
    ):
        deviceless.described_devices(DEVICES["h100"], 8)
    with pytest.raises(ConfigError, match="mi300x is not described"):
        deviceless.target(DEVICES["mi300x"])
