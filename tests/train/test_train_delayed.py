"""Training by delayed scales: every mesh sees the magnitudes of one device, and a run goes on with
those that it has seen.
"""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import (
    MESHES_OF_WEIGHTS,
    assert_same_bits,
    batches_of,
    compiled_step,
    initial_weights,
    prepared,
    tiny,
    trained,
)

import spmdtrain as st
from spmdtrain.compiled import hlo
from spmdtrain.config import ConfigError
from spmdtrain.train.all_parts import items_named
from spmdtrain.train.compared.in_order import placed_arrays
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.items.item import Taken
from spmdtrain.train.scaling.scales import largest_of, scales_of
from spmdtrain.train.step import find_gradients_of

SMALLEST = (
    "model.embed=16",
    "model.heads=2",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=8",
)
DELAYED = ("precision.matmul=float8", "precision.scaling=delayed")
LAYOUTS = {
    "four microbatches": ("train.microbatch=2",),
    "data, fsdp, tensor, zero": MESHES_OF_WEIGHTS["data, fsdp, tensor, zero"],
    "data, context, tensor": (
        "mesh.data=2",
        "mesh.context=2",
        "mesh.tensor=2",
        "rules.activations.stream_time=context,tensor",
        "train.microbatch=2",
    ),
    "expert, fsdp, context": (
        "mesh.expert=2",
        "mesh.fsdp=2",
        "mesh.context=2",
        "train.microbatch=1",
    ),
    "written out": ("mesh.data=2", "train.scan_layers=false", "train.remat=dots"),
}


@cache
def first_magnitudes(*placement: str) -> dict[str, np.ndarray]:
    """What the matmuls of the first batch see, [layers, 2], with the weights of one device."""
    setup = prepared(*SMALLEST, *DELAYED, *placement)
    params = placed_arrays(setup, initial_weights(*SMALLEST))
    history = st.init_state(setup).items["magnitudes"]
    find = jax.jit(find_gradients_of(setup))
    with batches_of(setup) as ahead:
        inputs = StepInputs(np.int32(0), next(ahead), items={"magnitudes": history})
        found = find(params, inputs)
    return jax.device_get(found.made["magnitudes"])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mesh_sees_the_magnitudes_of_one_device(layout):
    want, found = first_magnitudes(), first_magnitudes(*LAYOUTS[layout])
    assert found.keys() == want.keys() and len(want) == 4
    for path, seen in want.items():
        assert seen.shape == (2, 2) and seen.all()

        np.testing.assert_allclose(found[path], seen, rtol=1e-5, err_msg=path)


RUN = (*SMALLEST, *DELAYED, "mesh.data=2", "mesh.tensor=2", "train.microbatch=2")


@pytest.mark.long
def test_a_run_goes_on_to_the_bit_and_takes_what_it_has_seen_elsewhere(tmp_path):
    settings = (*RUN, "precision.scaling_history=3")
    setup, step = prepared(*settings), compiled_step(*settings)
    state = st.init_state(setup)
    with batches_of(setup) as ahead:
        for _ in range(2):
            before = jax.device_get(state.items["magnitudes"])
            state, _ = step(state, next(ahead))
        st.save(setup, state, tmp_path / "run")
        state = st.restore(tmp_path / "run", setup)
        seen = jax.device_get(state.items["magnitudes"])
        for _ in range(2):
            state, _ = step(state, next(ahead))
    assert_same_bits(state, trained(*settings, steps=4)[1])

    for path, history in seen.items():
        np.testing.assert_array_equal(history[:, 1:], before[path][:, :2])
        assert history[:, :2].all() and not history[:, 2].any()
    for steps in (1, 5):
        other = prepared(*SMALLEST, *DELAYED, f"precision.scaling_history={steps}")
        moved = jax.device_get(st.restore(tmp_path / "run", other).items["magnitudes"])
        for path, history in seen.items():
            assert moved[path].shape == (2, steps, 2)
            np.testing.assert_array_equal(moved[path][:, :3], history[:, :steps])
            assert not moved[path][:, 3:].any()
    others = prepared(*SMALLEST, *DELAYED, "precision.wide=*.mlp.*")
    begun = st.restore(tmp_path / "run", others).items["magnitudes"]
    assert len(begun) == 2 and not any(x.any() for x in begun.values())


@pytest.mark.long
def test_no_layer_waits_for_the_magnitude_of_another_device():
    text, sizes = (
        compiled_step(*RUN, "precision.scaling_history=3").as_text(),
        tiny(*RUN).mesh.sizes,
    )
    found = list(hlo.instructions(text, sizes))
    few = [each for each in found if each.inside_loop and each.bytes < 64]
    assert not few
    assert any(each.inside_loop for each in found)


def test_a_skipped_step_keeps_what_was_seen_before_it():
    before = {"magnitudes": {"w": np.arange(6.0).reshape(3, 2)}}
    latest = {"magnitudes": {"w": np.array([7.0, 8.0])}}
    for good, want in ((False, before["magnitudes"]["w"]), (True, [[7, 8], [0, 1], [2, 3]])):
        given = dict(loss=0, grad_norm=0, number=1, good=np.bool_(good), made=latest)
        after, _ = items_named(before).after_step(
            before, Taken(tiny(*DELAYED), {}, {}, {}, **given)
        )
        np.testing.assert_array_equal(after["magnitudes"]["w"], want)


def test_scales_are_the_largest_of_the_history_and_follow_the_loss_scale():
    setup = prepared(*DELAYED, "precision.scaling_history=3")
    path = "blocks.layer.mlp.down_fe"
    params = {path: np.full(setup.model.parameters[path].shape, -7.0, np.float32)}
    seen = np.zeros((2, 3, 2), np.float32)
    seen[0] = [[1, 8], [4, 2], [2, 1]]
    for cotangent in (None, np.float32(0.25)):
        scales = scales_of(params, {path: seen}, cotangent)[path]
        factor = np.array([1, 1, cotangent or 1])
        np.testing.assert_allclose(scales[0], [4 / 448, 7 / 448, 8 / 57344] * factor, rtol=1e-6)
        np.testing.assert_allclose(scales[1], [1, 7 / 448, 1] * factor, rtol=1e-6)
        slots = np.ones((2, 1, 1, 2), np.float32) * [3, 5]
        found = largest_of(setup, {path: slots}, cotangent)
        np.testing.assert_allclose(found[path], [[3, 5 / (cotangent or 1)]] * 2, rtol=1e-6)


def test_a_run_without_it_has_no_history():
    assert "magnitudes" not in prepared("precision.matmul=float8").state.items
    kept = prepared(*DELAYED, "precision.wide=*.attention.*").state.items["magnitudes"]
    assert {path: x.shape for path, x in kept.items()} == {
        "blocks.layer.mlp.up_ef": (2, 16, 2),
        "blocks.layer.mlp.down_fe": (2, 16, 2),
    }


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("precision.matmul=mxfp8", DELAYED[1]), "belongs to float8"),
        ((DELAYED[1],), "belongs to float8"),
        (("precision.matmul=float8", "precision.scaling_history=4"), "belongs to delayed scaling"),
        ((*DELAYED, "mesh.pipeline=2"), "mesh.pipeline=2 sum what a microbatch returns"),
        ((*DELAYED, *MESHES_OF_WEIGHTS["collective matmuls"]), "the pieces of mesh.collective"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, what):
    with pytest.raises(ConfigError) as refused:
        prepared(*settings)
    assert what in str(refused.value) and "; set " in str(refused.value)
