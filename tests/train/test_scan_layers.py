"""Layers that are written out train as those of one loop do, and leave no loop behind."""

import re

import jax
import numpy as np
import pytest
from helpers import MESHES, tiny, trained

from spmdtrain.config import ConfigError
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_step

OUT = "train.scan_layers=false"
LAYOUTS = {
    "one device": (),
    "data 2 fsdp 2 tensor 2": (*MESHES["data 2 fsdp 2 tensor 2"], "train.remat=dots"),
    "offloaded": ("mesh.fsdp=2", "train.remat=offload"),
    "experts, some frozen": ("mesh.expert=2", "model.experts.count=4", "model.experts.chosen=2")
    + ("finetune.frozen_layers=1",),
}


def compiled(*settings) -> str:
    """The text of a step of four layers on one device."""
    setup = shard(tiny("model.layers=4", *settings), devices=jax.devices()[:1])
    return make_step(setup).lower(setup.state, setup.batch).compile().as_text()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_the_loop_does(layout):
    want, loop, _ = trained(*LAYOUTS[layout], steps=3)
    got, out, _ = trained(*LAYOUTS[layout], OUT, steps=3)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for path, x in loop.params.items():
        np.testing.assert_allclose(out.params[path], x, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.long
def test_what_the_backward_pass_needs_is_in_no_stack():
    """The loop writes it into arrays of all layers, and takes it out again."""

    sizes = tiny().train.global_batch, tiny().train.sequence_length
    stacked = rf"f32\[4,{sizes[0]},{sizes[1]},[\d,]+\]"
    assert re.search(stacked, compiled()) and not re.search(stacked, compiled(OUT))


@pytest.mark.long
@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_what_is_to_be_recomputed_is(remat):
    """Outside a loop XLA would find it equal to the forward pass, and keep that."""

    def matmuls(remat: str) -> int:
        return len(re.findall(r" (?:dot|custom-call)\(", compiled(OUT, f"train.remat={remat}")))

    assert matmuls(remat) > matmuls("none")


def test_with_a_pipeline_it_is_refused():
    with pytest.raises(ConfigError, match="run their layers in a loop; set train.scan_layers=true"):
        tiny("mesh.pipeline=2", OUT)
