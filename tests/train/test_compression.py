"""[compression]: gradients on meshes near those of wide sums, vectors untouched, runs resumable."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.train.step import make_gradients

pytestmark = pytest.mark.long

LAYOUTS = {
    "data": ("mesh.data=4",),
    "data, fsdp, tensor, zero": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "train.microbatch=1",
        "train.zero=1",
    ),
    "pipeline, data, context": (
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.context=2",
        "train.microbatch=1",
    ),
}
# Where a mesh sums, and how narrow a number is, know nothing of each other.
CASES = [*((layout, "int8") for layout in LAYOUTS), ("data, fsdp, tensor, zero", "float8")]


@cache
def first_gradients(*settings: str) -> dict[str, np.ndarray]:
    setup = st.shard(tiny(*settings), devices=jax.devices()[: mesh_of(settings)])
    state = st.init_state(setup)
    with batches_of(setup) as ahead:
        found, _ = jax.device_get(
            jax.jit(make_gradients(setup))(state.params, state.step, next(ahead))
        )
    return found


@pytest.mark.parametrize(("layout", "codec"), CASES)
def test_matrices_are_near_and_vectors_the_same(layout, codec):
    wide = first_gradients(*LAYOUTS[layout])
    got = first_gradients(*LAYOUTS[layout], f"compression.codec={codec}", "compression.block=64")
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
