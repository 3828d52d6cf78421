"""[compression]: gradients on meshes near those of wide sums, vectors untouched. With error
feedback what is sent and what is kept add up to the gradient, and what is kept follows a run
elsewhere.
"""

import math
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from helpers import assert_same_bits, batches_of, compiled_step, mesh_of, prepared, tiny, trained

import spmdtrain as st
from spmdtrain.config.errors import ConfigError
from spmdtrain.planner.cost.workload import workload_of
from spmdtrain.train.all_parts import items_named
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.gradients.inputs import StepInputs
from spmdtrain.train.items.item import Taken
from spmdtrain.train.setup import Setup
from spmdtrain.train.step import find_gradients_of, make_gradients

pytestmark = pytest.mark.long

SEVERAL = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1")
LAYOUTS = {
    "data": ("mesh.data=4",),
    "data, fsdp, tensor": SEVERAL,
    "data, fsdp, tensor, zero": (*SEVERAL, "train.zero=1"),
    "pipeline, data, context": (
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.context=2",
        "train.microbatch=1",
    ),
    "data, tensor, zero": ("mesh.data=4", "mesh.tensor=2", "train.zero=1"),
}
# Where a mesh sums, and how narrow a number is, know nothing of each other.
PAIRS = ("compression.within=2",)
CASES = [
    ("data", "int8"),
    ("data, fsdp, tensor, zero", "int8"),
    ("pipeline, data, context", "int8"),
    ("data, fsdp, tensor, zero", "float8"),
    ("data, tensor, zero", "int8", *PAIRS),
]
LOW_RANK = ("compression.codec=lowrank",)
RANKS = {"blocks*mlp*": 2, "*table*": 0}  # of other matrices: 4
RANKED = (*LOW_RANK, *(f"compression.ranks.{pattern}={rank}" for pattern, rank in RANKS.items()))
LARGEST = ("compression.codec=topk", "compression.keep=0.1")
WITH_FEEDBACK = {
    "lowrank on data": (LAYOUTS["data"], RANKED),
    "lowrank on data, fsdp, tensor": (SEVERAL, RANKED),
    "lowrank on pipeline, data, context": (LAYOUTS["pipeline, data, context"], RANKED),
    "topk on data": (LAYOUTS["data"], LARGEST),
    "topk on pipeline, data, context": (LAYOUTS["pipeline, data, context"], LARGEST),
}


def on_mesh(settings: tuple[str, ...]) -> Setup:
    return st.shard(tiny(*settings), devices=jax.devices()[: mesh_of(settings)])


@cache
def first_gradients(*settings: str) -> dict[str, np.ndarray]:
    setup = on_mesh(settings)
    state = st.init_state(setup)
    with batches_of(setup) as ahead:
        found, _ = jax.device_get(
            jax.jit(make_gradients(setup))(state.params, state.step, next(ahead))
        )
    return found


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_matrices_are_near_and_vectors_the_same(case):
    layout, codec, *more = case
    wide = first_gradients(*LAYOUTS[layout])
    coded = (f"compression.codec={codec}", "compression.block=64", *more)
    got = first_gradients(*LAYOUTS[layout], *coded)
    stacked = st.shard(tiny(), devices=jax.devices()[:1]).model.parameters
    moved = 0
    for path, want in wide.items():
        off = np.linalg.norm(got[path] - want) / np.linalg.norm(want)
        if want.ndim - stacked[path].stacked < 2:
            assert off < 1e-6, path
        else:
            assert off < {"int8": 0.02, "float8": 0.05}[codec], path
            moved += off > 1e-4
    assert moved >= 5, "few were compressed"


@cache
def sent_and_kept(layout: tuple[str, ...], codec: tuple[str, ...]) -> tuple[dict, dict]:
    """(gradients that the first step finds, what is kept of them), as plain arrays."""
    setup = on_mesh(layout + codec)
    state = st.init_state(setup)
    with batches_of(setup) as ahead:
        find = jax.jit(find_gradients_of(setup))
        found = find(state.params, StepInputs(state.step, next(ahead), items=state.items))
    kept = {path: x.sum(0) for path, x in jax.device_get(found.made["errors"]).items()}
    return plain_arrays(setup, found.gradients), plain_arrays(setup, kept)


@pytest.mark.parametrize("case", WITH_FEEDBACK)
def test_what_is_sent_and_what_is_kept_add_up_to_the_mean_gradient(case):
    sent, kept = sent_and_kept(*WITH_FEEDBACK[case])
    wide = first_gradients(*LAYOUTS["data"])
    assert len(kept) >= 5, "few were compressed"
    for path, want in wide.items():
        most = np.abs(want).max()
        if path in kept:
            assert np.abs(kept[path]).max() > 1e-2 * most, f"{path}: nothing was kept"
        np.testing.assert_allclose(
            sent[path] + kept.get(path, 0), want, atol=1e-5 * most, err_msg=path
        )


@pytest.mark.parametrize("layout", ["data, fsdp, tensor", "pipeline, data, context"])
def test_thin_factors_send_the_same_on_every_mesh(layout):
    want, _ = sent_and_kept(LAYOUTS["data"], RANKED)
    got, _ = sent_and_kept(LAYOUTS[layout], RANKED)
    for path, x in want.items():
        np.testing.assert_allclose(got[path], x, atol=1e-4 * np.abs(x).max(), err_msg=path)


def test_where_all_data_shards_are_neighbours_gradients_are_summed_as_without_compression():
    coded = on_mesh(("mesh.data=4", "compression.codec=int8", "compression.within=4"))
    assert coded.reductions == on_mesh(("mesh.data=4",)).reductions


def test_each_matrix_has_the_rank_that_its_path_gives_it():
    """Against factors found by hand, of the whole gradients."""
    layout = LAYOUTS["data"]
    codecs = on_mesh(layout + RANKED).own["compression"].codecs
    wide, (sent, _) = first_gradients(*layout), sent_and_kept(layout, RANKED)
    ranks = {path: codec.rank for path, codec in codecs.items()}
    assert {path for path, rank in ranks.items() if rank == 2} == {p for p in ranks if "mlp" in p}
    assert 4 in ranks.values() and not any("table" in path for path in ranks)
    for path, rank in ranks.items():
        codec, shape = codecs[path], wide[path].shape
        apart, row = codec.apart, codec.apart + codec.row
        first = np.asarray(codec.first_factor(shape, path))
        rows_first = np.moveaxis(wide[path].astype("f8"), row, apart)
        matrices = rows_first.reshape(-1, shape[row], math.prod(first.shape[apart:-1]))
        got = np.moveaxis(sent[path], row, apart).reshape(matrices.shape)
        for m, q, each in zip(matrices, first.reshape(len(matrices), -1, rank), got, strict=True):
            base, _ = np.linalg.qr(m @ q)
            np.testing.assert_allclose(each, base @ base.T @ m, atol=1e-4 * np.abs(m).max())


SMALL = ("model.embed=16", "model.vocab=32", "train.sequence_length=8", "train.steps=4")
RESUMED = {
    "lowrank": ("mesh.data=2", "mesh.tensor=2", "compression.codec=lowrank", "compression.rank=2"),
    "topk": ("mesh.data=4", *LARGEST, "compression.after=1"),
}
# Another number of data shards, another layout of the layers, a table with other padding.
ELSEWHERE = ("mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "train.microbatch=2")


@pytest.mark.parametrize("codec", RESUMED)
def test_a_run_goes_on_to_the_bit_and_takes_what_is_kept_to_another_mesh(codec, tmp_path):
    settings = (*SMALL, *RESUMED[codec])
    setup, step = prepared(*settings), compiled_step(*settings)
    state = st.init_state(setup)
    with batches_of(setup) as ahead:
        for _ in range(2):
            state, _ = step(state, next(ahead))
        st.save(setup, state, tmp_path / "run")
        kept = plain_arrays(setup, {k: x.sum(0) for k, x in state.items["errors"].items()})
        state = st.restore(tmp_path / "run", setup)
        for _ in range(2):
            state, _ = step(state, next(ahead))
    assert_same_bits(state, trained(*settings, steps=4)[1])

    codec_settings = [each for each in settings if each.startswith("compression.")]
    other = prepared(*SMALL, *ELSEWHERE, *codec_settings)
    errors = st.restore(tmp_path / "run", other).items["errors"]
    moved = plain_arrays(other, {path: x.sum(0) for path, x in errors.items()})
    assert moved.keys() == kept.keys()
    for path, x in kept.items():
        assert x.any()
        np.testing.assert_allclose(moved[path], x, rtol=1e-6, atol=1e-9, err_msg=path)


def test_other_ranks_begin_their_factors_anew_and_other_matrices_all(tmp_path):
    settings = (*SMALL, *RESUMED["lowrank"])
    setup = prepared(*settings)
    state = st.init_state(setup)
    items = {name: jax.tree.map(jax.numpy.ones_like, each) for name, each in state.items.items()}
    st.save(setup, replace(state, items=items), tmp_path / "run")
    for rank, kept in ((1, 1.0), (0, 0.0)):
        other = prepared(*settings, f"compression.ranks.*mlp*={rank}")
        found = st.restore(tmp_path / "run", other).items
        assert all(np.all(x == kept) for x in found["errors"].values())
        assert not any(np.all(x == 1) for x in found["factors"].values())


def test_a_skipped_step_keeps_what_was_kept_before_it():
    config = tiny("mesh.data=2", *LOW_RANK)
    before = {"errors": {"w": np.ones((2, 3))}, "factors": {"w": np.ones(2)}}
    bad = {"errors": {"w": np.full((2, 3), np.nan)}, "factors": {"w": np.zeros(2)}}
    figures = dict(loss=0, grad_norm=0, number=1)
    for good, want in ((False, before), (True, bad)):
        taken = Taken(config, {}, {}, {}, **figures, good=np.bool_(good), made=bad)
        after, _ = items_named(before).after_step(before, taken)
        for name, arrays in want.items():
            assert np.array_equal(after[name]["w"], arrays["w"], equal_nan=True)


def test_what_is_kept_is_counted_where_memory_and_bytes_are():
    plain, coded = tiny("mesh.data=4"), tiny("mesh.data=4", *LOW_RANK)
    wide, thin = (workload_of(each, each.mesh.sizes) for each in (plain, coded))
    assert thin.held_item_bytes - wide.held_item_bytes == 4
    assert thin.sent_gradient_bytes == 4 * 2 * 4 / 32 and wide.sent_gradient_bytes is None
    largest = tiny("mesh.data=4", *LARGEST)
    assert workload_of(largest, largest.mesh.sizes).sent_gradient_bytes == pytest.approx(0.4)
    more, fewer = (
        workload_of(tiny(*LOW_RANK, f"compression.ranks.*mlp*={rank}"), plain.mesh.sizes)
        for rank in (3, 1)
    )
    sides = 2 * (32 + 128) * 2  # of the matrices of two MLPs
    of_ranks = more.sent_gradient_bytes - fewer.sent_gradient_bytes
    assert of_ranks == pytest.approx(4 * (3 - 1) * sides / prepared().model.size)
    one = tiny(*LOW_RANK)
    assert workload_of(one, one.mesh.sizes).held_item_bytes == 0
    assert not prepared(*LOW_RANK).state.items, "one data shard sends nothing and keeps nothing"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("train.zero=1", *LOW_RANK), "more than train.zero=1 saves"),
        (("compression.codec=int8", "compression.rank=2"), "belongs to 'lowrank', not to 'int8'"),
        (("compression.codec=lowrank", "compression.keep=0.1"), "belongs to 'topk'"),
        (("compression.codec=int8", "compression.after=2"), "belongs to 'lowrank' and 'topk'"),
        (("compression.after=20", *LOW_RANK), "set compression.after=6"),
        (("compression.within=2",), "belongs to 'int8' and 'float8', not to 'none'"),
        (("compression.within=2", *LARGEST), "belongs to 'int8' and 'float8', not to 'topk'"),
        (("compression.ranks.*mlp*=2", *LARGEST), "compression.ranks belongs to 'lowrank', not"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        tiny(*settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("compression.rank=64", *LOW_RANK), "no matrix has more numbers than its two factors"),
        (("compression.codec=topk", "compression.keep=1e-4"), "each of the 4 devices"),
        (("compression.codec=int8", "compression.within=3"), "does not divide the 4 devices"),
        ((*LOW_RANK, "compression.ranks.*mpl*=2"), "mpl.* is the path of no trained matrix"),
        ((*RANKED, "compression.ranks.blocks*up*=3"), "comes after 'blocks.mlp.', which leaves"),
        ((*LOW_RANK, "compression.ranks.*mlp*=64"), "64: no matrix of it has more numbers"),
        ((*LOW_RANK, "compression.ranks.*=0"), "gives every matrix the rank 0"),
    ],
)
def test_a_codec_that_no_matrix_of_the_model_has_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        prepared("mesh.data=4", *settings)
