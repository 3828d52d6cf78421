"""Layers that are written out train as those of one loop do, and leave no loop behind."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import MESHES, batches_of, prepared, tiny, trained

from spmdtrain.config import RunConfig, load
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients, make_step

CONFIGS = Path(__file__).parents[2] / "configs"
LOOP = "train.scan_layers=true"
OUT = "train.scan_layers=false"
LAYOUTS = {
    "one device": (),
    "data 2 fsdp 2 tensor 2": (*MESHES["data 2 fsdp 2 tensor 2"], "train.remat=dots"),
    "offloaded": ("mesh.fsdp=2", "train.remat=offload"),
    "experts, some frozen": ("mesh.expert=2", "model.experts.count=4", "model.experts.chosen=2")
    + ("finetune.frozen_layers=1",),
}


def compiled(*settings, layers: int = 4) -> str:
    """The text of a step of some layers on one device."""
    setup = shard(tiny(f"model.layers={layers}", *settings), devices=jax.devices()[:1])
    return make_step(setup).lower(setup.state, setup.batch).compile().as_text()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_the_loop_does(layout):
    want, loop, _ = trained(*LAYOUTS[layout], LOOP, steps=3)
    got, out, _ = trained(*LAYOUTS[layout], OUT, steps=3)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for path, x in loop.params.items():
        np.testing.assert_allclose(out.params[path], x, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.long
def test_what_the_backward_pass_needs_is_in_no_stack():
    """The loop writes it into arrays of all layers, and takes it out again."""

    sizes = tiny().train.global_batch, tiny().train.sequence_length
    stacked = rf"f32\[4,{sizes[0]},{sizes[1]},[\d,]+\]"
    assert re.search(stacked, compiled(LOOP)) and not re.search(stacked, compiled(OUT))


@pytest.mark.long
@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_what_is_to_be_recomputed_is(remat):
    """Outside a loop XLA would find it equal to the forward pass, and keep that."""
    assert matmuls(OUT, f"train.remat={remat}") > matmuls(OUT, "train.remat=none")


ONE_TURN = {
    "one layer": (1, ()),
    "one round": (2, ("model.mixers=['conv', 'attention']",)),
    "segments of one layer": (3, ("model.mixers=['conv', 'attention', 'none']",)),
}


@pytest.mark.long
@pytest.mark.parametrize("layers", ONE_TURN)
def test_what_is_to_be_recomputed_is_in_a_loop_of_one_turn(layers):
    """XLA writes such a loop out, and finds what it would outside of one."""
    count, mixers = ONE_TURN[layers]
    conv = ("model.conv.taps=3",) if mixers else ()
    of_remat = {
        remat: matmuls(LOOP, f"train.remat={remat}", *mixers, *conv, layers=count)
        for remat in ("none", "full")
    }
    assert of_remat["full"] > of_remat["none"]


def matmuls(*settings, layers: int = 4) -> int:
    return len(re.findall(r" (?:dot|custom-call)\(", compiled(*settings, layers=layers)))


# What a layer of each shipped config is made of, narrow and in float32. Those that are left out
# have the layers of one that is here.
NARROW = (
    *("model.embed=32", "model.heads=4", "model.ffn=48", "model.vocab=64", "model.max_length=16"),
    *("train.global_batch=2", "train.microbatch=2", "train.sequence_length=16"),
    "precision.compute=float32",
    *(f"mesh.{axis}=1" for axis in ("data", "fsdp", "expert")),
)
FEW = ("model.experts.count=4", "model.experts.chosen=2", "model.experts.ffn=16")
SHIPPED = {
    "gpt2_124m": ("model.layers=3",),
    "llama3_8b": ("model.layers=3", "model.kv_heads=2"),
    "open_model": ("model.layers=3",),
    "mixtral_8x7b": ("model.layers=3", "model.kv_heads=2", *FEW[:2]),
    "qwen3_30b_a3b": ("model.layers=3", "model.kv_heads=2", "model.head_dim=8", *FEW),
    "gpt_oss_20b": ("model.layers=4", "model.kv_heads=2", "model.head_dim=8", *FEW[:2])
    + ("model.windows=8,0",),
    "deepseek_v3": ("model.layers=4", *FEW, "model.experts.first_dense=1")
    + ("model.experts.groups=2", "model.experts.groups_kept=1")
    + ("model.latent.rank=16", "model.latent.query_rank=16", "model.latent.plain_dim=8")
    + ("model.latent.rope_dim=4", "model.latent.value_dim=8"),
}


def narrow(name: str, *settings: str) -> RunConfig:
    config = load(CONFIGS / f"{name}.toml", (*NARROW, *SHIPPED[name], *settings))
    return config.model_copy(update={"data": tiny().data})


def loss_and_gradients(config: RunConfig):
    setup = shard(config, devices=jax.devices()[:1])
    assert setup.scans_layers is config.train.scan_layers
    state = init_state(setup)
    with batches_of(setup) as ahead:
        gradients, sums = jax.jit(make_gradients(setup))(state.params, state.step, next(ahead))
    return float(sums["loss"]), jax.device_get(gradients)


@pytest.mark.long
@pytest.mark.parametrize("name", SHIPPED)
def test_the_layers_of_shipped_configs_compute_what_their_loop_does(name):
    want, of_loop = loss_and_gradients(narrow(name, LOOP))
    got, of_layers = loss_and_gradients(narrow(name, OUT))
    assert got == pytest.approx(want, rel=1e-6)
    for path, x in of_loop.items():
        np.testing.assert_allclose(of_layers[path], x, rtol=1e-4, atol=1e-6, err_msg=path)


def test_both_hold_the_same_state():
    """So a checkpoint of one is a checkpoint of the other."""
    states = [prepared(*setting).state for setting in ((), (LOOP,), (OUT,))]
    shapes = [[(p, x.shape, x.sharding) for p, x in jax.tree.leaves_with_path(s)] for s in states]
    assert shapes[0] == shapes[1] == shapes[2]
