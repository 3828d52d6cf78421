"""float16 with a dynamic loss scale: an overflow changes no weight, and the numbers are those of
float32.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, batches_of, compiled_step, prepared, tiny

import spmdtrain as st
from examples.seams.side_losses import CalmTransformer
from spmdtrain.checkpoints.leaves.stored_items import from_note
from spmdtrain.config import ConfigError
from spmdtrain.train.fresh import init_state, with_initial_items
from spmdtrain.train.items import loss_scale
from spmdtrain.train.items.loss_scale import LossScale
from spmdtrain.train.shard import shard
from spmdtrain.train.state import TrainState
from spmdtrain.train.step import make_gradients

pytestmark = pytest.mark.long

STEPS = 20
# Momentum alone: an update is as exact as its gradient.
NUMBERS = (
    "optimizer.name=sgd",
    "optimizer.learning_rate=0.1",
    "optimizer.schedule=constant",
    "optimizer.ema=0.9",
)
NARROW = (
    *NUMBERS,
    "precision.compute=float16",
    "precision.loss_scale=1024",
    "precision.loss_scale_steps=4",
)
LAYOUTS = {
    "one device": (),
    "data 2 tensor 2": ("mesh.data=2", "mesh.tensor=2", "train.zero=1", "train.microbatch=4"),
    "pipeline 2 data 2 tensor 2": (
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.tensor=2",
        "train.microbatch=2",
    ),
}


@cache
def followed(
    *settings: str, scale: float | None = None, steps: int = STEPS
) -> tuple[list[dict], TrainState, TrainState]:
    """(metrics of the steps, the first state, the last) from the weights of one device."""
    setup = prepared(*settings)
    step = compiled_step(*settings)

    def begin() -> TrainState:
        state = init_state(setup)
        if scale is None or "loss_scale" not in state.items:
            return state
        before = state.items["loss_scale"]
        first = jax.device_put(np.float32(scale), before.scale.sharding)
        return replace(state, items=state.items | {"loss_scale": replace(before, scale=first)})

    state = begin()
    metrics = []
    with batches_of(setup) as ahead:
        for _ in range(steps):
            state, found = step(state, next(ahead))
            metrics.append(jax.device_get(found))
    return metrics, begin(), state


def of(name: str, metrics: Sequence[dict]) -> np.ndarray:
    return np.array([each[name] for each in metrics])


def test_it_trains_as_float32_does_within_float16():
    """float16 has 11 bits: a loss of 4 is exact to 2e-3, as long as the weights are."""
    narrow, _, _ = followed(*NARROW)
    wide, _, _ = followed(*NUMBERS)
    assert not of("overflow", narrow).any()
    got, want = of("loss", narrow), of("loss", wide)
    assert want[0] - want[-1] > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-3)
    assert not np.array_equal(got, want), "nothing was computed in float16"
    np.testing.assert_allclose(of("grad_norm", narrow), of("grad_norm", wide), rtol=2e-2)


def test_the_scale_doubles_after_so_many_good_steps():
    scales = of("loss_scale", followed(*NARROW)[0])
    assert list(scales) == [1024.0 * 2 ** (step // 4) for step in range(STEPS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_is_too_large_comes_down_and_changes_no_weight(layout):
    metrics, begun, state = followed(*NARROW, *LAYOUTS[layout], scale=2.0**32, steps=4)
    assert of("overflow", metrics).all() and of("skipped", metrics).all()
    assert np.isfinite(of("loss", metrics)).all()
    assert list(of("loss_scale", metrics)) == [2.0**32, 2.0**31, 2.0**30, 2.0**29]
    assert float(state.items["loss_scale"].scale) == 2.0**28
    for name in ("params", "opt_state"):
        assert_same_bits(getattr(state, name), getattr(begun, name))
    assert_same_bits(state.items["ema"], begun.items["ema"])
    assert int(state.step) == 4, "the batch of a step that is left is used up"


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one device"])
def test_a_mesh_gives_the_numbers_of_one_device(layout):
    got, _, _ = followed(*NARROW, *LAYOUTS[layout], steps=6)
    want = followed(*NARROW)[0][:6]
    np.testing.assert_allclose(of("loss", got), of("loss", want), rtol=3e-4)
    np.testing.assert_allclose(of("grad_norm", got), of("grad_norm", want), rtol=5e-3)
    for name in ("loss_scale", "overflow"):
        assert np.array_equal(of(name, got), of(name, want))


# The rules of the scale


def followed_scale(scale: float, *norms: float, loss: float = 4.0) -> list[float]:
    """The scales after steps with these gradient norms."""
    precision = tiny("precision.compute=float16", "precision.loss_scale_steps=3").precision
    state = LossScale(jnp.float32(scale), jnp.int32(0))
    found = []
    for norm in norms:
        state = loss_scale.after_step(state, precision, jnp.float32(loss), jnp.float32(norm))
        found.append(float(state.scale))
    return found


def test_an_overflow_halves_the_scale_and_the_good_steps_count_anew():
    inf = np.inf
    assert followed_scale(8, 1, 1, 1, 1) == [8, 8, 16, 16]
    assert followed_scale(8, 1, 1, inf, 1, 1, 1) == [8, 8, 4, 4, 4, 8]
    assert followed_scale(2, np.nan, inf, inf) == [1, 1, 1]
    assert followed_scale(2.0**32, 1, 1, 1) == [2.0**32] * 3
    assert followed_scale(8, inf, loss=np.nan) == [8], "no scale helps against a loss of nan"


def test_a_checkpoint_of_before_begins_with_the_first_scale():
    setup = prepared(*NARROW)
    asked = setup.state.items["loss_scale"]
    assert from_note(loss_scale.ITEM, asked, {}) is None
    begun = with_initial_items(setup, init_state(setup), ["loss_scale"]).items["loss_scale"]
    kept = from_note(loss_scale.ITEM, asked, {"loss_scale": [512.0, 3]})
    assert (float(begun.scale), int(begun.good_steps)) == (1024.0, 0)
    assert kept is not None and (float(kept.scale), int(kept.good_steps)) == (512.0, 3)
    assert kept.good_steps.dtype == jnp.int32
    assert "loss_scale" not in prepared(*NUMBERS).state.items, "it goes on in float32"


@pytest.mark.parametrize("name", ["loss_scale", "loss_scale_steps"])
def test_a_scale_that_nothing_reads_is_refused(name):
    said = f"precision.{name}=4096 belongs to float16, not to 'bfloat16'"
    with pytest.raises(ConfigError, match=said):
        tiny("precision.compute=bfloat16", f"precision.{name}=4096")


# Where the backward pass starts


def test_a_pipeline_scales_every_loss_and_divides_the_cotangent_out_again():
    """Side losses of layers too. A power of two changes no bit of a float32 gradient."""
    small = ("model.embed=16", "model.heads=2", "model.vocab=32", "train.sequence_length=8")
    config = tiny(*small, "mesh.pipeline=2", "train.microbatch=4")
    setup = shard(config, CalmTransformer, jax.devices()[:2])
    find = jax.jit(make_gradients(setup))
    params = init_state(setup).params
    with batches_of(setup) as ahead:
        batch = next(ahead)
    plain, scaled = (
        jax.device_get(find(params, jnp.int32(0), batch, jnp.float32(by))) for by in (1, 2**10)
    )
    assert {"loss", "size", "change"} <= plain[1].keys()
    assert_same_bits(scaled, plain)


# A run and its files


def run(directory: Path, *settings: str) -> None:
    policy = ("guard.policy=skip", "guard.most_skipped=1")
    files = ("checkpoint.every=5", "checkpoint.keep=9", "train.steps=20")
    config = tiny(*NARROW, "precision.loss_scale=4e9", *policy, *files, *settings)
    assert st.run(config, directory, devices=jax.devices()[:1]).status == "finished"


def test_a_run_comes_down_from_any_scale_and_resumes_to_the_bit(tmp_path):
    """An overflow is no bad step: `most_skipped` does not count it."""
    run(tmp_path / "whole")
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    overflows = int(of("overflow", metrics).sum())
    assert 10 < overflows < 18
    scales = of("loss_scale", metrics)
    assert scales[0] == np.float32(4e9) and scales[-1] < 2**20
    events = (tmp_path / "whole" / "events.jsonl").read_text()
    assert '"skipped"' not in events

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for step in (15, 20):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(step))
    run(tmp_path / "resumed")
    setup = prepared(*NARROW)
    got, want = (st.restore(tmp_path / name, setup) for name in ("resumed", "whole"))
    assert int(want.items["loss_scale"].good_steps) > 0
    assert_same_bits(got, want)
