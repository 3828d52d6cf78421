"""The memory formula against the real step compiled for GPUs that are not there.

benchmarks/planner/memory.py compares more layouts.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.experimental import topologies

from spmdtrain.config import ConfigError
from spmdtrain.planner import deviceless
from spmdtrain.planner.hardware import DEVICES

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
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
    pasted = [part for setting in settings for part in ("--set", setting)]
    command = [
        "-m",
        "spmdtrain.cli",
        "estimate",
        str(path),
        "--hardware",
        "h100",
        "--compile",
        "--json",
        *pasted,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    xla = found["compiled"]["memory"]
    held = xla["argument_bytes"] + xla["output_bytes"] - xla["alias_bytes"] + xla["temp_bytes"]
    assert found["memory_bytes_per_device"]["total"] == pytest.approx(held, rel=0.2)
    assert found["compiled"]["collectives"]


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
