"""finetune.frozen_layers: the layers above learn as before, those below stay bit for bit, keep no
activations and have no backward.
"""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import (
    MESHES,
    assert_gradients_of_one_device,
    batches_of,
    compiled_step,
    mesh_of,
    pipeline,
    tiny,
    trained,
)

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.models.counted_flops import counted_flops_per_token, forward_flops_per_token
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.memory import kept_bytes, step_memory
from spmdtrain.planner.cost.workload import workload_of

pytestmark = pytest.mark.long

LAYERS = ("model.layers=3", "model.tied=false")
FROZEN = "finetune.frozen_layers=2"
LAYOUTS = {
    "one device": (),
    "data 2 fsdp 2 tensor 2, zero": (*MESHES["data 2 fsdp 2 tensor 2"], "train.zero=1"),
    "context 2 data 2": ("mesh.context=2", "mesh.data=2", "train.remat=full"),
}
OPTIMIZERS = ("adafactor", "adamw", "lamb", "lion", "muon", "schedule_free_adamw", "sgd", "soap")
BELOW = {"tokens.table_ve", "positions_te"}
# Frozen layers of six, and a pipeline whose stages lie wholly below, above, and at the edge.
PIPELINES = [
    (2, (2, (), "1f1b", 1, 2, "none")),  # the edge is in the first chunk
    (4, (2, ("data", "fsdp"), "interleaved", 3, 2, "full")),  # ends with a chunk of each stage
    (4, (4, ("tensor",), "zero_bubble", 1, 1, "none")),  # two stages wholly below
    (3, (2, (), "gpipe", 1, 1, "dots")),
]


def in_stack(path: str) -> bool:
    return path.startswith("blocks.")


@cache
def begun(*settings: str):
    setup = st.shard(tiny(*LAYERS, *settings), devices=jax.devices()[: mesh_of(settings)])
    return setup, st.init_state(setup)


@cache
def first_gradients(*settings: str) -> dict[str, np.ndarray]:
    setup, state = begun(*settings)
    with batches_of(setup) as ahead:
        found, _ = jax.device_get(
            jax.jit(st.train.step.make_gradients(setup))(state.params, state.step, next(ahead))
        )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layers_above_have_the_gradients_that_they_have_without(layout):
    found = first_gradients(FROZEN, *LAYOUTS[layout])
    whole = first_gradients()
    assert set(whole) - set(found) == BELOW
    for path, got in found.items():
        want = whole[path]
        if in_stack(path):
            assert not got[:2].any(), path
            got, want = got[2:], want[2:]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want) + 1e-9, path


@pytest.mark.parametrize(("below", "case"), PIPELINES, ids=lambda x: str(x)[:30])
def test_gradients_of_a_pipeline_are_those_of_one_device(below, case):
    numbers = ("model.layers=6", "model.tied=true", f"finetune.frozen_layers={below}")
    assert_gradients_of_one_device(numbers, pipeline(*case), 1e-5)


def test_a_pipeline_moves_nothing_that_is_frozen():
    """Weight decay would; the last chunk is half padding."""
    settings = (*LAYERS, FROZEN, "mesh.pipeline=2", "optimizer.weight_decay=0.1")
    setup, state = begun(*settings)
    before = jax.device_get(state.params)
    after = jax.device_get(trained(*settings, steps=1)[1].params)
    below = setup.model.stage_layout.numbers < 2
    for path, was in before.items():
        same = np.array_equal(after[path], was)
        assert same == (path in BELOW), path
        if in_stack(path):
            assert np.array_equal(after[path][below], was[below]), path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_moves_what_is_frozen(optimizer):
    settings = (*LAYERS, FROZEN, f"optimizer.name={optimizer}")
    before = begun(FROZEN, f"optimizer.name={optimizer}")[1].params
    before = jax.device_get(before)
    _, state, _ = trained(*settings, steps=2)
    after = jax.device_get(state.params)
    for path, was in before.items():
        if path in BELOW:
            assert np.array_equal(after[path], was), path
        elif in_stack(path):
            assert np.array_equal(after[path][:2], was[:2]), path
            assert not np.array_equal(after[path][2], was[2]), path


def test_a_tied_table_learns_as_the_head():
    found = first_gradients(FROZEN, "model.tied=true")
    assert found["tokens.table_ve"].any() and "positions_te" not in found


def test_a_step_keeps_no_activations_of_frozen_layers():
    """A third of the temporaries is left beside one layer of nine that learns."""
    deep = ("model.layers=9", "train.sequence_length=64", "train.global_batch=32")
    whole = compiled_step(*deep).memory_analysis().temp_size_in_bytes
    frozen = compiled_step(*deep, "finetune.frozen_layers=8").memory_analysis().temp_size_in_bytes
    assert frozen < 0.4 * whole, (frozen, whole)


def test_stages_below_leave_the_stash_of_those_above():
    """Of four stages two learn: each keeps four microbatches fewer, as estimated."""
    deep = (
        "model.layers=4",
        "mesh.pipeline=4",
        "train.global_batch=16",
        "train.microbatch=2",
        "train.sequence_length=64",
    )

    def held(*settings):
        config = tiny(*deep, *settings)
        workload = workload_of(config, config.mesh.sizes)
        memory = compiled_step(*deep, *settings).memory_analysis()
        return memory.temp_size_in_bytes, step_memory(workload).activations, kept_bytes(workload)

    (whole, estimated, kept), (frozen, left, _) = held(), held("finetune.frozen_layers=2")
    assert estimated - left == 4 * kept
    assert whole - frozen > 0.9 * 4 * kept


def test_a_frozen_layer_counts_only_its_forward():
    def counted(*settings):
        setup, _ = begun(*settings)
        return counted_flops_per_token(setup.config, setup.model)

    def forward(layers):
        config = tiny(f"model.layers={layers}", "model.tied=false")
        model = st.shard(config, devices=jax.devices()[:1]).model
        return forward_flops_per_token(config, model)

    layer = forward(2) - forward(1)
    assert counted() == pytest.approx(3 * forward(3))
    assert counted() - counted(FROZEN) == pytest.approx(2 * 2 * layer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("finetune.frozen_layers=3",), "of the 3 layers from 1 to 2 can be frozen"),
    ],
)
def test_what_cannot_be_frozen_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny(*LAYERS, *settings)


def test_the_planner_counts_what_frozen_layers_save():
    sizes = tiny().mesh.sizes
    config = tiny(*LAYERS, FROZEN, "train.global_batch=8", "train.microbatch=8")
    whole, frozen = (
        workload_of(each, sizes) for each in (tiny(*LAYERS, "train.global_batch=8"), config)
    )
    kept = step_memory(whole).activations - step_memory(frozen).activations
    assert kept == 2 * kept_bytes(whole)
    counted = counted_flops_per_token(config, begun(FROZEN)[0].model)
    length = config.train.sequence_length
    assert model_flops_per_token(frozen.model, length, frozen.trained) == pytest.approx(counted)
