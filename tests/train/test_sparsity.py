"""[sparsity]: which elements are zero is what numpy says, the same on any mesh, and they stay zero
through training, checkpoints, exports and imports.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, batches_of, compiled_step, mesh_of, prepared, tiny

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.config.schema import SparsityConfig
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.running.published.export_run import export_run
from spmdtrain.train.compared.in_order import plain_arrays, plain_state
from spmdtrain.train.sparsity.elements import largest, largest_of_each
from spmdtrain.train.sparsity.timetable import number_kept

# Momentum alone, so that a weight is as exact as its gradient.
NUMBERS = (
    *("model.layers=3", "model.embed=24", "model.heads=2", "model.vocab=50"),
    *("train.steps=6", "train.sequence_length=8", "train.global_batch=16"),
    *("optimizer.name=sgd", "optimizer.learning_rate=2.0", "optimizer.schedule=constant"),
    *("sparsity.since=2", "sparsity.every=2", "sparsity.until=4", "guard.policy=skip"),
)
GROUPS = (*NUMBERS, "sparsity.pattern=2:4")
MAGNITUDE = (*NUMBERS, "sparsity.pattern=magnitude", "sparsity.share=0.6")
# fsdp cuts groups of 4 in two, and ZeRO-1 and the pipeline pad.
FSDP = ("mesh.data=2", "mesh.fsdp=4", "train.zero=1", "train.microbatch=1")
PIPELINE = ("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "train.microbatch=2")
SPLIT = ("mesh.fsdp=2", "mesh.tensor=2")
CASES = [(GROUPS, ()), (GROUPS, FSDP), (GROUPS, PIPELINE), (MAGNITUDE, ()), (MAGNITUDE, SPLIT)]


@cache
def followed(*settings: str):
    """(setup, the state after each step, its metrics)."""
    setup = prepared(*settings)
    step, state = compiled_step(*settings), st.init_state(setup)
    states, metrics = [], []
    with batches_of(setup) as ahead:
        for _ in range(setup.config.train.steps):
            state, found = step(state, next(ahead))
            states.append(jax.tree.map(jnp.copy, state))
            metrics.append(jax.device_get(found))
    return setup, states, metrics


def masks_of(setup, state) -> dict[str, np.ndarray]:
    return {leaf.path: x for leaf, x in plain_state(setup, state).items() if leaf.kind == "masks"}


def largest_in_numpy(x: np.ndarray, count: int) -> np.ndarray:
    stays = np.zeros(x.size, bool)
    stays[np.argsort(-np.abs(x).ravel(), kind="stable")[:count]] = True
    return stays.reshape(x.shape)


def in_groups(path: str, mask_l: np.ndarray) -> np.ndarray:
    """Rows of 4 inputs, in the order of their matmul."""
    ins = {"qkv_eknd": 1, "up_ef": 1, "out_kgde": 3, "down_fe": 1}[path.rsplit(".", 1)[1]]
    layers, dims = len(mask_l), mask_l.shape[1 : 1 + ins]
    flat = mask_l.reshape(layers, np.prod(dims), -1).transpose(0, 2, 1)
    return flat.reshape(-1, 4)


def test_the_largest_elements_stay_and_the_first_of_equal_ones():
    """As a stable sort says, also of numbers that are equal, and however devices hold them."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    where = jax.NamedSharding(mesh, jax.P("data", "tensor"))
    draw = np.random.default_rng(1)
    choose = jax.jit(largest)
    for digits in (0, 1, 6):
        x = np.round(draw.normal(size=(6, 16)), digits).astype(np.float32)
        here = jax.device_put(x, where)
        for count in (0, 1, 40, 95, 96):
            assert np.array_equal(choose(here, count), largest_in_numpy(x, count))
        rows = np.stack([largest_in_numpy(row, 3) for row in x.reshape(-1, 8)])
        assert np.array_equal(largest_of_each(here, 3, 8, 1), rows.reshape(x.shape))
    odd = np.float32([np.nan, 3, -np.inf, -0.0, 0.0, 2])
    assert np.asarray(largest(odd, 2)).tolist() == [True, False, True, False, False, False]


def test_the_share_of_zeros_follows_the_cubic_schedule():
    settings = SparsityConfig(pattern="magnitude", share=0.8, since=10, every=5, until=30)
    found = {step: 1000 - int(number_kept(settings, 1000, jnp.int32(step))) for step in range(40)}
    # It begins one interval before `since`: 5 choices of share (1 - (1 - k / 5)^3).
    for step in range(10, 40):
        k = min((step - 10) // 5 + 1, 5)
        assert found[step] == round(1000 * 0.8 * (1 - (1 - k / 5) ** 3))
    assert found[30] == found[39] == 800


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join((case[0][-1], *case[1])))
@pytest.mark.long
def test_every_mesh_has_the_zeros_of_one_device(case):
    numbers, mesh = case
    setup, states, metrics = followed(*numbers, *mesh)
    alone, ones, _ = followed(*numbers)
    wanted = [0, 0.5, 0.5, 0.5, 0.5, 0.5] if numbers is GROUPS else [0, 0.525, 0.525, 0.6, 0.6, 0.6]
    for number, (state, one) in enumerate(zip(states, ones, strict=True)):
        masks, expected = masks_of(setup, state), masks_of(alone, one)
        weights = plain_arrays(setup, state.params)
        assert {path.rsplit(".", 1)[1] for path in masks} == {
            *("qkv_eknd", "out_kgde", "up_ef", "down_fe")
        }
        for path, mask in masks.items():
            assert np.array_equal(mask, expected[path]), path
            assert not weights[path][~mask].any()
            if numbers is GROUPS and number:
                assert set(in_groups(path, mask).sum(1)) == {2}
        assert float(metrics[number]["zeros"]) == pytest.approx(wanted[number], abs=1e-3)
    path = "blocks.layer.mlp.up_ef"
    then, now = (masks_of(setup, states[at])[path] for at in (2, 4))
    assert not np.array_equal(then, now), "the choice is made anew"
    assert_same_bits(states[3].items["masks"], states[5].items["masks"])
    dense = weights["tokens.table_ve"]
    assert np.count_nonzero(dense) == dense.size


@pytest.mark.long
def test_a_run_goes_on_to_the_bit_through_a_choice_and_on_another_mesh(tmp_path):
    setup, states, _ = followed(*MAGNITUDE, *SPLIT)
    st.save(setup, states[2], tmp_path / "run")
    state = st.restore(tmp_path / "run", setup)
    step = compiled_step(*MAGNITUDE, *SPLIT)
    with batches_of(setup) as ahead:
        batches = [next(ahead) for _ in range(6)]
    for batch in batches[3:]:
        state, _ = step(state, batch)
    assert_same_bits(state, states[-1])
    alone = prepared(*MAGNITUDE)
    moved = st.restore(tmp_path / "run", alone)
    assert_same_bits(masks_of(alone, moved), masks_of(setup, states[2]))


@pytest.mark.long
def test_a_skipped_step_changes_no_zero_and_its_choice_is_made_after_the_next():
    setup, states, _ = followed(*GROUPS)
    step = compiled_step(*GROUPS)
    first = jax.tree.map(jnp.copy, states[0])
    norm = "norm.scale_e"
    broken = replace(first, params=first.params | {norm: first.params[norm] * np.nan})
    with batches_of(setup) as ahead:
        batches = [next(ahead) for _ in range(3)]
    after, found = step(jax.tree.map(jnp.copy, broken), batches[1])
    assert found["skipped"] == 1
    assert_same_bits(after.items["masks"], first.items["masks"])
    assert after.step == 2
    mended = replace(after, params=first.params)
    last, found = step(mended, batches[2])
    assert found["skipped"] == 0
    assert float(found["zeros"]) == 0.5
    assert all(set(in_groups(p, m).sum(1)) == {2} for p, m in masks_of(setup, last).items())


@pytest.mark.long
def test_narrow_weights_their_average_and_experts_have_zeros_too():
    """bfloat16 rounded stochastically, AdamW with weight decay and muP, each expert by itself."""
    more = ("precision.params=bfloat16", "precision.rounding=stochastic", "optimizer.ema=0.9")
    more += ("model.name=llama", "model.vocab=32", "model.experts.count=4")
    more += ("model.experts.ffn=8", "model.experts.chosen=2")
    more += ("model.embed=16", "model.heads=2", "model.layers=2", "model.mup_base=8")
    more += ("train.sequence_length=8", "train.steps=3", "sparsity.pattern=1:4", "mesh.expert=2")
    setup, states, metrics = followed(*more)
    state = states[-1]
    kept = masks_of(setup, state)
    assert {path.rsplit(".", 1)[1] for path in kept} == {
        *("qkv_eknd", "out_kgde", "up_xeu", "down_xfe")
    }
    averages = {leaf.path: x for leaf, x in plain_state(setup, state).items() if leaf.kind == "ema"}
    for path, x in plain_arrays(setup, state.params).items():
        if path not in kept:
            continue
        assert x.dtype == jnp.bfloat16
        assert np.mean(kept[path]) == 0.25
        assert not x[~kept[path]].any() and not averages[path][~kept[path]].any()
        assert np.count_nonzero(averages[path][kept[path]]) > 0.9 * np.sum(kept[path])
    assert set(kept["blocks.layer.mlp.down_xfe"].reshape(2, 4, 2, 4, 16).sum(3).ravel()) == {1}
    assert float(metrics[-1]["zeros"]) == 0.75


@pytest.mark.long
def test_an_export_has_the_zeros_and_a_run_from_it_keeps_them(tmp_path):
    setup, states, _ = followed(*GROUPS)
    st.save(setup, states[-1], tmp_path / "sparse")
    export_run(tmp_path / "sparse", tmp_path / "out")
    projections = 0
    for name, tensor in open_tensors(tmp_path / "out").items():
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            projections += 1
            ins_out = np.asarray(tensor.map())  # as GPT-2 has them
            assert set(np.count_nonzero(ins_out.T.reshape(-1, 4), 1)) == {2}, name
    assert projections == 4 * 3
    dense = [each for each in NUMBERS if not each.startswith("sparsity")]
    more = ("sparsity.pattern=kept", f"train.init_from={tmp_path / 'out'}", "train.steps=2")
    st.run(tiny(*dense, *more), tmp_path / "kept", devices=jax.devices()[:1])
    before, after = st.weights(tmp_path / "sparse"), st.weights(tmp_path / "kept")
    for path, x in before.items():
        if path in states[-1].items["masks"]:
            assert np.array_equal(x == 0, after[path] == 0), path
            assert not np.array_equal(x, after[path])


def test_masks_are_counted_where_memory_is():
    dense, sparse = (workload_of(tiny(*more), {}) for more in ((), ("sparsity.pattern=2:4",)))
    assert sparse.item_bytes - dense.item_bytes == 1
    masks = prepared("sparsity.pattern=2:4", "mesh.fsdp=2").state.items["masks"]
    weights = prepared("mesh.fsdp=2").state.params
    for path, mask in masks.items():
        assert (mask.dtype, mask.shape) == (bool, weights[path].shape)
        assert mask.sharding == weights[path].sharding


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("sparsity.pattern=2:4:8",), "none, magnitude, kept or N:M"),
        (("sparsity.pattern=4:4",), "N below M"),
        (("sparsity.pattern=2:4", "sparsity.share=0.5"), "belongs to 'magnitude'"),
        (("sparsity.since=3",), "sets no weight to zero"),
        (("sparsity.pattern=kept", "sparsity.until=3"), "sets no weight to zero"),
        (("sparsity.pattern=2:4", "sparsity.since=3", "sparsity.until=2"), "before since=3"),
        (("sparsity.pattern=2:4", "sparsity.every=3"), "there is one choice"),
        (("sparsity.pattern=2:4", "sparsity.until=21"), "beyond train.steps=20"),
        (("sparsity.pattern=2:4", "finetune.kind=lora"), "an adapter adds a dense product"),
        (("sparsity.pattern=2:4", "finetune.frozen_layers=1"), "frozen layers would lose weights"),
        (
            ("sparsity.pattern=kept", "islands.count=2", "islands.index=0", "islands.directory=x"),
            "a meeting averages them",
        ),
        (("sparsity.pattern=3:7",), "attention.out_kgde has 8 inputs in a row"),
        (("sparsity.pattern=2:4", "sparsity.weights=blocks.*.upp_ef"), "no weight has the path"),
        (("sparsity.pattern=2:4", "sparsity.weights=*table*"), "not a trained matrix"),
        (
            ("sparsity.pattern=2:4", "optimizer.name=schedule_free_adamw"),
            "a second copy of the weights",
        ),
    ],
)
def test_what_would_not_stay_sparse_is_refused_by_name(settings, what):
    with pytest.raises(ConfigError, match=what) as refused:
        st.shard(tiny(*settings), devices=jax.devices()[: mesh_of(settings)])
    assert "sparsity" in str(refused.value) or "islands" in str(refused.value)
