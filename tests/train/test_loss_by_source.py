"""The training loss of each source of a mixture: exact on any mesh, without a collective more."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import MESHES, SPLIT, mesh_of, tiny

from spmdtrain.compiled import hlo
from spmdtrain.config import ConfigError, DataConfig
from spmdtrain.data.batches import batch_ids
from spmdtrain.data.source import open_data
from spmdtrain.running.compile_step import lower_step
from spmdtrain.running.report.metrics import make_figures
from spmdtrain.train.fresh import init_state
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_eval_step, make_step

pytestmark = pytest.mark.long

SOURCES = ("web", "books", "code")
STEPS = 3


@cache
def setup_of(mesh: str, *, mixed: bool = True) -> Setup:
    config = tiny("data.packing=documents", *MESHES[mesh])
    if mixed:
        mix = [{"name": name, "path": f"{name}.bin"} for name in SOURCES]
        data = DataConfig(mix=mix, packing="documents")
        config = config.model_copy(update={"data": data})
    return shard(config, devices=jax.devices()[: mesh_of(MESHES[mesh])])


def batch_of(setup: Setup, step: int) -> dict[str, jax.Array]:
    """A batch of the synthetic corpus: a third is books, the rest web, and none is code."""
    config, data = open_data(tiny("data.packing=documents"))
    draw = data.train_samples(config)

    def samples(ids: np.ndarray) -> dict[str, np.ndarray]:
        return {**draw(ids), "source": (ids % 3 == 1).astype(np.int32)}

    ids = batch_ids(step, 16)
    return setup.to_devices(samples, ids)


@cache
def compiled(mesh: str, *, mixed: bool = True) -> jax.stages.Compiled:
    return lower_step(setup_of(mesh, mixed=mixed)).compile()


@cache
def trained(mesh: str) -> list[dict[str, float]]:
    setup = setup_of(mesh)
    state = init_state(setup)
    found = []
    for step in range(STEPS):
        state, metrics = compiled(mesh)(state, batch_of(setup, step))
        found.append({name: float(x) for name, x in metrics.items()})
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_the_losses_of_the_sources_add_up_to_the_loss_and_are_those_of_one_device(mesh):
    for got, want in zip(trained(mesh), trained("one device"), strict=True):
        assert got["tokens"] == sum(got[f"tokens/{source}"] for source in SOURCES)
        summed = sum(got[f"loss/{source}"] * got[f"tokens/{source}"] for source in SOURCES)
        assert summed == pytest.approx(got["loss"] * got["tokens"], rel=1e-6)
        assert got["loss/web"] != got["loss/books"] and got["tokens/code"] == 0
        assert got.keys() == want.keys()
        for name in want:
            assert got[name] == pytest.approx(want[name], rel=1e-6, abs=0), name


def test_the_loss_of_a_source_is_that_of_the_batch_with_the_others_masked():
    setup = setup_of("one device")
    batch = batch_of(setup, 0)
    evaluate = make_eval_step(setup)
    params = init_state(setup).params
    first = trained("one device")[0]
    for number, source in enumerate(SOURCES[:2]):
        alone = batch["mask"] * (batch["source"] == number)[..., None]
        total, tokens = evaluate(params, batch | {"mask": alone})
        assert first[f"tokens/{source}"] == float(tokens) > 0
        assert first[f"loss/{source}"] == pytest.approx(float(total / tokens), rel=1e-6)


@pytest.mark.parametrize("mesh", SPLIT)
def test_it_needs_no_collective_more_and_a_step_without_a_mixture_has_none_of_it(mesh):
    """Sums are wider; as many cross the mesh, over the same axes."""
    sizes = setup_of(mesh).mesh.shape

    def crossing(mixed: bool) -> list[tuple[str, str, bool]]:
        text = compiled(mesh, mixed=mixed).as_text()
        return sorted((c.kind, c.axis, c.inside_loop) for c in hlo.instructions(text, sizes))

    assert crossing(mixed=True) == crossing(mixed=False)
    assert "source" not in setup_of(mesh, mixed=False).batch


def test_a_step_is_the_same_with_and_without_the_figures():
    setup = setup_of("one device", mixed=False)
    batch = batch_of(setup, 0)
    del batch["source"]
    metrics = jax.device_get(make_step(setup)(init_state(setup), batch)[1])
    first = trained("one device")[0]
    assert {name: float(x) for name, x in metrics.items()} == {
        name: x for name, x in first.items() if "/" not in name
    }


def test_a_source_without_tokens_is_left_out_of_the_figures():
    found = make_figures(setup_of("one device"))(1, trained("one device")[0], 1.0)
    assert {name for name in found if "/" in name} == {
        f"{figure}/{source}" for figure in ("loss", "tokens") for source in ("web", "books")
    }
    assert isinstance(found["tokens/web"], int)


def test_own_samples_beside_a_mixture_are_refused():
    config = setup_of("one device").config
    with pytest.raises(ConfigError, match="data= gives all samples, and data.mix names sources"):
        open_data(config, lambda seed, index: np.arange(17) + 0 * (seed + index))
