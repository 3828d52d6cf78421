"""The record of a run: what each step was fed, and what each start ran."""

import json

import jax
import numpy as np
import pytest
from helpers import mesh_of, prepared, tiny

from spmdtrain.data.source import open_data
from spmdtrain.running import loop
from spmdtrain.running.record.token_hash import added, sums_of_batch, sums_of_rows

MESHES = [
    (),
    ("mesh.data=2", "mesh.tensor=2"),
    ("mesh.pipeline=2", "mesh.context=2", "train.microbatch=2"),
]
SETTINGS = ("train.steps=3", "model.embed=16", "train.global_batch=8", "checkpoint.every=0")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of a run on each mesh."""
    found = {}
    for mesh in MESHES:
        found[mesh] = tmp_path_factory.mktemp("run") / "run"
        loop.run(tiny(*SETTINGS, *mesh), found[mesh], devices=jax.devices()[: mesh_of(mesh)])
    return found


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_every_mesh_feeds_a_step_the_same_and_says_so(recorded):
    first, *others = (lines(each / "steps.jsonl") for each in recorded.values())
    assert [line["samples"] for line in first] == [[0, 7], [8, 15], [16, 23]]
    assert len({line["tokens"] for line in first}) == 3
    assert all(other == first for other in others)


@pytest.mark.seconds
def test_a_start_is_written_with_what_a_replay_needs(recorded):
    directory = recorded[MESHES[1]]
    loop.run(tiny(*SETTINGS, *MESHES[1], "train.steps=4"), directory, devices=jax.devices()[:4])
    first, second = (json.loads((directory / f"starts/{n}.json").read_text()) for n in (1, 2))
    assert (first["from_step"], second["from_step"]) == (0, 3)
    assert first["config"]["train"]["steps"] == 3
    assert first["mesh"]["tensor"] == 2 and len(first["devices"]) == 4
    assert first["xla_flags"] and first["versions"]["jax"] == jax.__version__
    assert first["program"]["hash"] == second["program"]["hash"]
    assert "all-reduce" in first["program"]["opcodes"]


@pytest.mark.seconds
def test_no_record_is_kept_where_none_is_asked_for_and_no_loss_moves(recorded, tmp_path):
    loop.run(tiny(*SETTINGS, "log.record=none"), tmp_path, devices=jax.devices()[:1])
    assert not (tmp_path / "steps.jsonl").exists()
    without, with_record = (
        [(line["loss"], line["grad_norm"]) for line in lines(each / "metrics.jsonl")]
        for each in (tmp_path, recorded[()])
    )
    assert without == with_record


def rows_of(draw, sample) -> dict[str, np.ndarray]:
    shape = (len(sample), 5)
    return {
        "tokens": draw.integers(0, 50, shape, np.int32),
        "mask": draw.random(shape, np.float32),
        "source": draw.integers(0, 3, len(sample), np.int32),
        "sample": np.asarray(sample, np.uint32),
    }


def test_the_hash_is_that_of_the_parts_in_any_order():
    rows = rows_of(np.random.default_rng(0), [4, 5, 2**32 - 1, 0])
    whole = sums_of_rows(rows)
    halves = [
        sums_of_rows({name: x[part] for name, x in rows.items()}) for part in ([2, 0], [3, 1])
    ]
    assert added(*halves) == whole


@pytest.mark.parametrize("mesh", [(), ("mesh.context=2",), ("mesh.data=2", "mesh.tensor=2")])
def test_the_devices_find_the_hash_of_the_rows_in_whatever_order_they_hold_them(mesh):
    setup = prepared(*SETTINGS, *mesh)
    _, data = open_data(setup.config)
    samples = data.train_samples(setup.config)
    ids = np.arange(8, 16)
    sums = np.asarray(sums_of_batch(setup, setup.to_devices(samples, ids)))
    assert tuple(sums.tolist()) == sums_of_rows(samples(ids))


def test_one_changed_bit_changes_both_sums():
    draw = np.random.default_rng(1)
    rows = rows_of(draw, [7, 8])
    before = sums_of_rows(rows)
    for name in ("tokens", "mask", "source"):
        for bit in (0, 31):
            changed = rows[name].copy()
            changed.view(np.uint32).flat[draw.integers(changed.size)] ^= np.uint32(1 << bit)
            after = sums_of_rows(rows | {name: changed})
            assert all(one != other for one, other in zip(before, after, strict=True))
