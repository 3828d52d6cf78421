"""When a stack is one loop, and when its layers are written out."""

import pytest
from helpers import prepared, tiny

from spmdtrain.config import ConfigError
from spmdtrain.parallel.mesh import AXES
from spmdtrain.train.layer_loop import WRITTEN_OUT, WRITTEN_OUT_ON_CPU, scans_layers

H200 = "NVIDIA H200"
# (what runs where) -> (device, mesh axes of more than one device, settings, is it a loop?)
CASES = {
    "one CPU": ("cpu", {}, (), False),
    "one CPU, as many layers as are written out": ("cpu", {}, ("model.layers=8",), False),
    "one CPU, one layer more": ("cpu", {}, ("model.layers=9",), True),
    "one H200": (H200, {}, (), False),
    "an H100 by another name": ("NVIDIA H100 80GB HBM3", {}, (), False),
    "one GPU of AMD": ("AMD Instinct MI300X", {}, (), True),
    "data 8": (H200, {"data": 8}, (), False),
    "data 8 on CPUs": ("cpu", {"data": 8}, (), True),
    "fsdp": (H200, {"fsdp": 8}, (), True),
    "data and fsdp": (H200, {"data": 4, "fsdp": 2}, (), True),
    "tensor": (H200, {"tensor": 2}, (), True),
    "context": (H200, {"context": 2}, (), True),
    "experts": (H200, {"expert": 4}, (), True),
    "pipeline": (H200, {"pipeline": 2}, (), True),
    "as many layers as are written out": (H200, {}, ("model.layers=48",), False),
    "one layer more": (H200, {}, ("model.layers=49",), True),
    "recomputed": (H200, {}, ("train.remat=full",), False),
    "inputs on the host": (H200, {}, ("train.remat=offload",), True),
    "a loop by hand": (H200, {}, ("train.scan_layers=true",), True),
    "written out by hand on a CPU": (
        *("cpu", {}),
        ("train.scan_layers=false", "model.layers=9"),
        False,
    ),
    "written out by hand, deep": (
        *(H200, {"fsdp": 8}),
        ("train.scan_layers=false", "model.layers=49", "train.remat=offload"),
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case):
    device, axes, settings, is_loop = CASES[case]
    sizes = dict.fromkeys(AXES, 1) | axes
    assert scans_layers(tiny(*settings), sizes, device) is is_loop


def test_the_cases_stand_on_both_sides_of_the_bound():
    depths = {
        device: {
            tiny(*settings).model.layers for of, _, settings, _ in CASES.values() if of == device
        }
        for device in ("cpu", H200)
    }
    assert {WRITTEN_OUT, WRITTEN_OUT + 1} <= depths[H200]
    assert {WRITTEN_OUT_ON_CPU, WRITTEN_OUT_ON_CPU + 1} <= depths["cpu"]


def test_a_pipeline_is_a_loop_unless_asked_otherwise():
    assert tiny().train.scan_layers == "auto"
    assert prepared("mesh.pipeline=2", "train.microbatch=2").scans_layers


@pytest.mark.parametrize("settings", [(), ("mesh.data=2",)])
def test_a_pipeline_that_is_to_be_written_out_is_refused(settings):
    with pytest.raises(ConfigError, match="run their layers in a loop; set train.scan_layers=true"):
        tiny("mesh.pipeline=2", "train.scan_layers=false", *settings)
