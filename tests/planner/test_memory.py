"""Memory: the state off the abstract state, the stash off the schedule's table, what a layer keeps off its jaxpr."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from helpers import prepared, tiny

from spmdtrain.config import ConfigError
from spmdtrain.models.abstract import build_model
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.stack import rematerialised, run_block
from spmdtrain.parallel.pipeline import schedule
from spmdtrain.parallel.pipeline.layer_vjp import LayerGradient
from spmdtrain.planner import memory
from spmdtrain.planner.job import Job, Layout, Shape, job_of
from spmdtrain.run import loop
from spmdtrain.train.state import bytes_per_device

LLAMA = (
    *("model.name=llama", "model.layers=4", "model.embed=32", "model.heads=4"),
    *("model.kv_heads=2", "model.ffn=96", "model.vocab=64"),
)
LAYOUTS = [
    ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1"),
    ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2", "train.zero=1", "train.remat=dots"),
    (*LLAMA, "mesh.fsdp=4", "mesh.tensor=2", "train.remat=full"),
    (
        *LLAMA,
        "mesh.pipeline=2",
        "mesh.fsdp=2",
        "train.microbatch=4",
        "pipeline.schedule=interleaved",
        "pipeline.chunks=2",
    ),
]


@pytest.mark.parametrize("overrides", LAYOUTS)
def test_argument_bytes_of_the_compiled_step(overrides):
    setup = prepared(*overrides)
    compiled = loop.lower_step(setup).compile().memory_analysis()
    batch = setup.batch
    batch = bytes_per_device({name: x for name, x in batch.items() if name != "sample"})  # of dropout alone
    exact = memory.exact_state(setup.config, dict(setup.mesh.shape))
    assert sum(exact) + batch == compiled.argument_size_in_bytes


def test_the_closed_form_of_the_state_is_close():
    for overrides in LAYOUTS:
        config = tiny(*overrides, "model.embed=256", "model.ffn=1024")
        sizes = dict(config.mesh.sizes)
        exact = memory.exact_state(config, sizes)
        assert memory.state(job_of(config, sizes)) == pytest.approx(exact, rel=0.03)


def _kept(config) -> tuple[int, int]:
    """Bytes of (LayerGradient.kept, deferred), of two sequences; deferred is 0 where nothing is taken apart."""
    blueprint, dtype = build_model(config), jnp.dtype(config.precision.compute)
    weights = {
        path: jax.ShapeDtypeStruct(p.shape[1:], dtype)
        for path, p in blueprint.parameters.items()
        if path.startswith("blocks")
    }
    sequence = config.train.sequence_length
    ctx = ForwardContext(positions_bt=jnp.zeros((2, sequence), jnp.int32), remat=config.train.remat)

    def layer(weights, x, number):
        y, _ = run_block(blueprint.bind(weights).blocks.layer, x, ctx, number)
        return y, jnp.float32(0)

    x = jax.ShapeDtypeStruct((2, sequence, config.model.embed), dtype)
    layer = rematerialised(layer, config.train.remat)
    split = config.train.remat == "none"
    found = LayerGradient(layer, weights, x, jax.ShapeDtypeStruct((), jnp.int32), split=split)
    shapes = found.kept, found.deferred if split else ()
    return tuple(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in shapes)


@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize("model", [(), LLAMA])
def test_what_a_layer_keeps(model, remat):
    config = tiny(*model, f"train.remat={remat}", "precision.compute=bfloat16", "train.global_batch=2")
    job = job_of(config, dict(config.mesh.sizes))
    kept, deferred = _kept(config)
    assert memory.kept(job) == kept
    if remat == "none":
        assert memory.deferred(job) == deferred


def test_places_of_the_rings_are_those_of_the_table():
    shape = Shape(24, 64, 4, 4, 16, 256, 512)
    for kind, p, m, v in product(schedule.KINDS, (2, 3, 4), (1, 2, 4, 6, 12), (1, 2, 3)):
        try:
            table = schedule.build(kind, p, m, v)
        except ConfigError:
            continue
        job = Job(shape, 16, m, 1, Layout(p), kind, v)
        slots = table.slots, table.cotangent_slots, table.deferred_slots
        assert memory.rings(job) == (slots[0] + 1, *(size + 1 if size else 0 for size in slots[1:])), (kind, p, m, v)


def test_memory_moves_as_it_should():
    shape = Shape(24, 1024, 16, 16, 64, 4096, 32768)
    job = Job(shape, 1024, 64, 1, Layout(4, data=2), "1f1b", remat="full")
    held = memory.ours(job)
    assert held.total == sum(held.describe()[name] for name in list(held.describe())[:-1])
    more = memory.ours(replace(job, global_batch=128))
    assert more.activations == held.activations  # not with the number of microbatches
    assert memory.ours(replace(job, schedule="gpipe", global_batch=128)).activations > 3 * held.activations
    assert memory.ours(replace(job, zero=1)).optimizer * 2 == held.optimizer
    assert memory.ours(replace(job, remat="none")).activations > 10 * held.activations
