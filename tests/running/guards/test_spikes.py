"""A loss or a gradient far above those before it: the step is skipped, alike on every mesh and
after a resume.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, mesh_of, tiny

from spmdtrain.checkpoints import restore
from spmdtrain.config.errors import DivergedError
from spmdtrain.running import loop
from spmdtrain.train.items import spikes
from spmdtrain.train.shard import shard

pytestmark = pytest.mark.usefixtures("shared_programs")

WINDOW, BATCH, STEPS = 8, 4, 12
POISON = 63  # a token id
SPIKE, LATER = 7, 10  # steps
SETTINGS = (
    "model.embed=16",
    "model.layers=2",
    "optimizer.schedule=constant",
    "optimizer.learning_rate=1e-3",
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    f"guard.window={WINDOW}",
    "checkpoint.every=0",
)
LAYOUTS = {
    "one device": (),
    "fsdp": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1"),
    "pipeline": ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=1"),
}


def tokens(_seed: int, index: int) -> np.ndarray:
    ids = np.random.default_rng(index).integers(0, POISON, 17, np.int32)
    if index in (BATCH * (SPIKE - 1) + 1, BATCH * (LATER - 1)):
        ids[5] = POISON
    return ids


def spiking(logits, targets):
    """Cross-entropy, and a poisoned target counts a thousandfold."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.where(targets == POISON, 1000 * losses, losses)


def run(directory: Path, *settings: str, stop: int = 0) -> loop.Outcome:
    """Stops with step `stop` in flight, that is after it."""
    config = tiny(*SETTINGS, *settings)
    devices = jax.devices()[: mesh_of(settings)]
    hooks = [lambda event, step, _: event == "step" and step == stop - 1]
    return loop.run(config, directory, devices=devices, data=tokens, loss=spiking, hooks=hooks)


def lines(directory: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def figures(directory: Path) -> list[tuple]:
    names = ("loss", "grad_norm", "loss_limit", "grad_norm_limit", "skipped")
    return [tuple(line[name] for name in names) for line in lines(directory)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    assert run(directory, "guard.policy=skip").status == "finished"
    return directory


def test_the_limits_are_those_of_numpy():
    guard = tiny(
        "guard.policy=skip", f"guard.window={WINDOW}", "guard.sigmas=3", "guard.grad_norm=4"
    ).guard
    draw = np.random.default_rng(0)
    recent = jnp.array(spikes.no_figures(guard))
    kept = []
    for number in range(3 * WINDOW):
        most = np.asarray(spikes.limits(guard, recent))
        expected = np.array([np.inf, 4.0])
        if 2 * len(kept) >= WINDOW:
            last = np.array(kept[-WINDOW:], np.float64)
            expected = np.minimum(expected, last.mean(0) + 3 * last.std(0, ddof=1))
        np.testing.assert_allclose(most, expected, rtol=1e-5)
        row = draw.normal((3, 2), 1).astype(np.float32)
        good = number % 5 != 4
        recent = spikes.remember(recent, jnp.array(row), jnp.array(good))
        kept += [row] if good else []
    most = jnp.array([3.0, 2.0])
    for figures, good in (
        ((3, 2), True),
        ((3.001, 2), False),
        ((3, 2.001), False),
        ((jnp.nan, 2), False),
    ):
        assert bool(spikes.is_good(jnp.array(figures), most)) == good
    assert not bool(spikes.is_good(jnp.array([jnp.inf, 2]), jnp.array([jnp.inf, jnp.inf])))


@pytest.mark.long
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_every_mesh_skips_what_one_device_skips(layout, undisturbed, tmp_path):
    assert [line["step"] for line in lines(undisturbed) if line["skipped"]] == [SPIKE, LATER]
    run(tmp_path, "guard.policy=skip", *LAYOUTS[layout])
    for got, want in zip(figures(tmp_path), figures(undisturbed), strict=True):
        assert got[-1] == want[-1]
        assert [x is None for x in got] == [x is None for x in want]
        known = [[x for x in each if x is not None] for each in (got, want)]
        np.testing.assert_allclose(*known, rtol=1e-4)  # limits: sums of squares of differences


@pytest.mark.long
def test_it_says_which_samples_and_why(undisturbed):
    events = [line for line in lines(undisturbed, "events.jsonl") if line["event"] == "skipped"]
    assert [(event["step"], event["samples"]) for event in events] == [
        (7, [24, 27]),
        (10, [36, 39]),
    ]
    assert "6 standard deviations above the mean of earlier steps" in events[0]["why"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run on one device that ended before the first spike."""
    directory = tmp_path_factory.mktemp("stopped")
    assert run(directory, "guard.policy=skip", stop=SPIKE - 1) == loop.Outcome("stopped", SPIKE - 1)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("onto", ["one device", "fsdp"])
def test_a_resumed_run_judges_as_if_it_had_never_stopped(onto, undisturbed, stopped, tmp_path):
    settings = ("guard.policy=skip", *LAYOUTS[onto])
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    assert run(tmp_path, *settings) == loop.Outcome("finished", STEPS)
    if onto != "one device":
        assert [line["step"] for line in lines(tmp_path) if line["skipped"]] == [SPIKE, LATER]
        return
    assert figures(tmp_path) == figures(undisturbed)
    setup = shard(tiny(*SETTINGS, *settings), devices=jax.devices()[:1])
    got, want = (restore.restore(directory, setup) for directory in (tmp_path, undisturbed))
    assert np.isfinite(want.items["recent"]).all()
    assert_same_bits(got, want)


@pytest.mark.long
def test_a_run_that_is_to_abort_does_so_if_it_is_asked_to_judge(tmp_path):
    with pytest.raises(DivergedError, match=f"step {SPIKE} is .*, 6 standard deviations above"):
        run(tmp_path, "guard.sigmas=6")
