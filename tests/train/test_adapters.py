"""Adapters of a frozen model: what they compute, on any mesh, and what is trained and kept."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import batches_of, mesh_of, tiny

import spmdtrain as st
from spmdtrain.train.step import make_gradients

pytestmark = pytest.mark.long

SMALLEST = (
    "model.name=llama",
    "model.embed=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=24",
    "model.layers=2",
    "model.vocab=32",
    "train.sequence_length=8",
    "train.global_batch=8",
    "finetune.kind=dora",
    "finetune.rank=3",
    "finetune.dropout=0.25",
    "finetune.also_train=norm.*",
    "precision.frozen=bfloat16",
)
LAYOUTS = {
    "data, fsdp, tensor, zero": (
        "mesh.data=2",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "train.microbatch=1",
        "train.zero=1",
    ),
    "collective matmuls": (
        "mesh.context=2",
        "mesh.tensor=2",
        "mesh.collective_matmul=true",
        "rules.activations.stream_time=context,tensor",
    ),
    "pipeline": ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "train.microbatch=1"),
    "zero bubble": (
        "mesh.pipeline=2",
        "mesh.context=2",
        "pipeline.schedule=zero_bubble",
        "train.microbatch=2",
    ),
}


def setup_of(*settings: str) -> st.Setup:
    return st.shard(tiny(*SMALLEST, *settings), devices=jax.devices()[: mesh_of(settings)])


def moved(setup, params):
    """The parameters, those that are trained away from where they begin: b is zero there."""
    trained, _ = setup.model.split_trained(params)
    shardings = {path: x.sharding for path, x in trained.items()}
    in_stack, layout = setup.model.in_stack, setup.model.layout

    def drawn(path, x):
        key = jax.random.key(sum(map(ord, path)))
        shape = setup.model.parameters[path].shape
        if in_stack(path):
            shape = (layout.layers, *shape[len(layout.shape) :])
        noise = 0.3 * jax.random.normal(key, shape)
        staged = layout.staged(noise) if in_stack(path) else noise
        return x + setup.padding.to_rest(path, staged)

    move = jax.jit(
        lambda trained: {path: drawn(path, x) for path, x in trained.items()},
        out_shardings=shardings,
    )
    return params | move(trained)


@cache
def first_batch(*settings: str) -> tuple[float, dict[str, np.ndarray]]:
    """(mean loss, gradients) of the first batch."""
    setup = setup_of(*settings)
    state = st.init_state(setup)
    params = moved(setup, state.params)
    with batches_of(setup) as ahead:
        gradients = jax.jit(make_gradients(setup))(params, state.step, next(ahead))
        found, sums = jax.device_get(gradients)
    in_stack, unstaged = setup.model.in_stack, setup.model.layout.unstaged
    in_order = {path: unstaged(g) if in_stack(path) else g for path, g in found.items()}
    return float(sums["loss"] / sums["tokens"]), in_order


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_have_the_loss_and_gradients_of_one_device(layout):
    got, found = first_batch(*LAYOUTS[layout])
    want, wanted = first_batch()
    assert got == pytest.approx(want, rel=1e-6)
    assert found.keys() == wanted.keys()
    for path in wanted:
        off = np.linalg.norm(found[path] - wanted[path]) / np.linalg.norm(wanted[path])
        assert off <= 1e-6, f"{path}: {off}"
