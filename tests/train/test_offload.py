"""train.remat = "offload": the numbers of full recomputation, and layers' inputs on the host."""

import dataclasses
import json

import numpy as np
import pytest
from absent_gpu import needs_compiler, printed
from helpers import MESHES, tiny, trained

from spmdtrain.config import ConfigError
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.cost.memory import kept_bytes, step_memory
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.plan import plan
from spmdtrain.planner.settings.remedy import cheapest_change

pytestmark = pytest.mark.long

LAYOUTS = {name: MESHES[name] for name in ("one device", "data 2 fsdp 2 tensor 2")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_full_recomputation(layout):
    want, _, _ = trained(*LAYOUTS[layout], "train.remat=full", steps=3)
    got, _, _ = trained(*LAYOUTS[layout], "train.remat=offload", steps=3)
    np.testing.assert_allclose(got, want, rtol=3e-7)


def test_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match="set train.remat='full'"):
        tiny("mesh.pipeline=2", "train.remat=offload")


DEEP = ("model.layers=12", "model.embed=64", "train.sequence_length=512", "train.global_batch=8")
MEMORY = """
from spmdtrain.processes.xla_flags import set_xla_flags
set_xla_flags(deviceless=True)
import json, sys
from helpers import tiny
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.deviceless import executable
found = {}
for remat in ("full", "offload"):
    config = tiny(*sys.argv[1:], f"train.remat={remat}")
    made, _ = executable(config, dict(config.mesh.sizes), hardware("h100"))
    memory = made.memory_analysis()
    found[remat] = memory.temp_size_in_bytes, memory.host_temp_size_in_bytes
print(json.dumps(found))
"""


@needs_compiler
def test_the_compiled_step_keeps_the_inputs_of_layers_on_the_host():
    # Both as loops: what is offloaded always is one.
    found = json.loads(printed(MEMORY, *DEEP, "train.scan_layers=true").splitlines()[-1])
    (full, nothing), (device, host) = found["full"], found["offload"]
    workload = workload_of(tiny(*DEEP, "train.remat=full"), tiny().mesh.sizes)
    assert nothing == 0 and host == 12 * kept_bytes(workload)
    assert full - device >= 0.9 * host


def test_the_planner_counts_two_layers_on_their_way():
    config = tiny(*DEEP, "train.remat=offload")
    full = workload_of(tiny(*DEEP, "train.remat=full"), config.mesh.sizes)
    offloaded = workload_of(config, config.mesh.sizes)
    saved = step_memory(full).activations - step_memory(offloaded).activations
    assert saved == 10 * kept_bytes(full)


LONG = (
    "model.name=llama",
    "model.layers=32",
    "model.embed=4096",
    "model.heads=32",
    "model.vocab=32000",
    "train.sequence_length=65536",
    "train.global_batch=8",
    "train.microbatch=1",
    "precision.compute=bfloat16",
)


def test_it_is_proposed_only_where_nothing_else_fits():
    config = tiny(*LONG, "train.remat=full", "mesh.fsdp=8")
    full = step_memory(workload_of(config, config.mesh.sizes)).total
    assert cheapest_change(config, config.mesh.sizes, 0.75) == ["train.remat=offload"]
    assert not any(each.workload.offloads for each in plan(config, 8, hardware("h200")))
    small = dataclasses.replace(hardware("h200"), memory=full)  # 90 % of which are safe
    on_host = [each for each in plan(config, 8, small) if each.workload.offloads]
    assert any(each.fits and "train.remat=offload" in each.settings for each in on_host)
