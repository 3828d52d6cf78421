"""optimizer.memory = "host": the moments rest on the host, and training is that of the device."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES, assert_same_bits, mesh_of, tiny, trained

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.config import ConfigError
from spmdtrain.planner.cost.hardware import hardware
from spmdtrain.planner.cost.memory import exact_state, host_bytes, step_memory
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.planner.estimate import estimate
from spmdtrain.planner.plan import plan
from spmdtrain.planner.settings.remedy import _candidates, cheapest_change
from spmdtrain.running import loop
from spmdtrain.train.shard import shard

# Weights and moments of 4 bytes are most of what it needs.
WIDE = (
    "model.name=llama",
    *("model.layers=16", "model.embed=2048", "model.heads=16", "model.vocab=32000"),
    *("train.sequence_length=128", "train.global_batch=1", "train.remat=full"),
    "precision.compute=bfloat16",
)
TWO_BY_TWO = ("mesh.data=2", "mesh.fsdp=2", "train.zero=1")
HOST = "optimizer.memory=host"
LAYOUTS = {
    "data 2 fsdp 2 tensor 2, zero, padding": (
        *MESHES["data 2 fsdp 2 tensor 2"],
        "train.zero=1",
        "model.vocab=61",
    ),
    "pipeline 2 data 2, a skipped step": (
        *("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2"),
        *("guard.policy=skip", "guard.grad_norm=1.0"),
    ),
    "one device, lion, bfloat16": ("optimizer.name=lion", "optimizer.moment_dtype=bfloat16"),
}


def kinds(state) -> set[str]:
    """The kinds of memory of the leaves that have more than one number a layer."""
    leaves = [x for x in jax.tree.leaves(state.opt_state) if x.dtype != np.int32]
    return {x.sharding.memory_kind for x in leaves}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_that_of_moments_on_the_device(layout):
    """But for the last bit of a sum of products, which XLA rounds once or twice, and where that
    carries a moment in bfloat16 to the next number.
    """
    want, device, figures = trained(*LAYOUTS[layout], steps=3)
    got, host, others = trained(*LAYOUTS[layout], HOST, steps=3)
    assert kinds(host) == {"pinned_host"} != kinds(device)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    skipped = [[float(x.get("skipped", 0)) for x in each] for each in (figures, others)]
    assert skipped[0] == skipped[1]
    trees = [(each.params, each.opt_state) for each in (host, device)]
    for ours, theirs in zip(*map(jax.tree.leaves, trees), strict=True):
        narrow = ours.dtype == jnp.bfloat16
        ours, theirs = np.float32(ours), np.float32(theirs)
        off = np.abs(ours - theirs)
        if narrow:
            assert (off > 0).mean() < 0.01
            off = off - 2.0**-7 * np.abs(theirs)  # the next number
        assert off.max() <= 1e-5 * np.abs(theirs).max() + 1e-12


@pytest.mark.long
@pytest.mark.usefixtures("shared_programs")
def test_a_resumed_run_has_the_bits_of_the_run_and_may_move_its_moments(tmp_path):
    """From the host to the device and back."""
    steps = ("train.steps=4", "checkpoint.every=1", "checkpoint.keep=9", *TWO_BY_TWO)

    def last(run, *settings, step=None):
        config = tiny(*steps, *settings)
        devices = jax.devices()[: mesh_of(steps)]
        loop.run(config, run, devices=devices, step=step)
        setup = shard(config, devices=devices)
        return Checkpoints(run, setup, keep=None).restore(4, setup.state)[0]

    whole = last(tmp_path / "run", HOST)
    assert kinds(whole) == {"pinned_host"}
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    assert_same_bits(last(tmp_path / "again", HOST, step=2), whole)
    moved = last(tmp_path / "again", step=2)
    assert "pinned_host" not in kinds(moved)
    back = last(tmp_path / "again", HOST, step=3)
    assert kinds(back) == {"pinned_host"}
    for path, x in whole.params.items():
        np.testing.assert_allclose(back.params[path], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("optimizer.name=muon",), "muon is not built"),
        (("optimizer.name=soap",), "soap is not built"),
        (("optimizer.name=schedule_free_adamw",), "schedule_free_adamw is not built"),
        (("optimizer.moment_dtype=8bit",), "set optimizer.moment_dtype='bfloat16'"),
    ],
)
def test_an_optimizer_for_which_it_is_not_built_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny(*settings, HOST)


def test_the_planner_counts_moments_on_the_host():
    layout = ("mesh.data=2", "mesh.fsdp=2", "train.zero=1")
    here, there = tiny(*layout), tiny(*layout, HOST)
    sizes = here.mesh.sizes
    moments = 2 * exact_state(here, sizes)[0]  # float32, as the weights
    left = exact_state(there, sizes)[1]
    assert exact_state(here, sizes)[1] == moments + left  # counters of steps
    workload = workload_of(there, sizes)
    assert host_bytes(workload) == pytest.approx(moments, rel=0.05)
    assert step_memory(workload).optimizer == 0
    seconds = [estimate(each, 4, "h100").time.terms["host_transfers"] for each in (here, there)]
    assert seconds == [0, pytest.approx(2 * host_bytes(workload) / 25e9)]


def test_it_is_the_last_change_that_a_remedy_tries():
    config = tiny(*WIDE, "train.remat=none", "train.global_batch=8", "mesh.data=2")
    moves = ["optimizer.memory" in each for each in _candidates(config, config.mesh.sizes)]
    assert moves == sorted(moves) and len(set(moves)) == 2


def test_it_is_proposed_only_where_nothing_else_fits():
    config = tiny(*WIDE)
    sizes = config.mesh.sizes
    assert cheapest_change(config, sizes, 0.7) == ["optimizer.memory=host"]
    assert not any("optimizer.memory=host" in each.settings for each in plan(config, 1, "h200"))
    held = step_memory(workload_of(config, sizes)).total
    small = dataclasses.replace(hardware("h200"), memory=int(0.8 * held))
    found = [each for each in plan(config, 1, small) if "optimizer.memory=host" in each.settings]
    assert found and found[0].fits
