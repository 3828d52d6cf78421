"""A step whose numbers have gone wrong: skipped without a trace in the weights, or the end of the
run.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, tiny

from spmdtrain.checkpoints import restore
from spmdtrain.config.errors import DivergedError
from spmdtrain.models.transformer import Transformer
from spmdtrain.running import loop
from spmdtrain.train.shard import shard

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

DEVICES = jax.devices()[:2]
BATCH, BAD, STEPS = 4, 3, 5  # the batch of step 3 is poisoned
POISON = 63  # a token id
SETTINGS = (
    "mesh.data=2",
    "model.layers=1",
    "optimizer.schedule=constant",
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    "checkpoint.every=1",
    "checkpoint.keep=10",
)
SKIP = ("guard.policy=skip", "optimizer.ema=0.9")


def tokens(_seed: int, index: int) -> np.ndarray:
    ids = np.random.default_rng(index).integers(0, POISON, 17, np.int32)
    if index == BATCH * (BAD - 1) + 1:  # one sample of one device
        ids[5] = POISON
    return ids


class Poisoned(Transformer):
    def embed(self, tokens_bt, ctx):
        x_bte = super().embed(tokens_bt, ctx)
        return jnp.where((tokens_bt == POISON)[..., None], jnp.nan, x_bte)


def run(directory: Path, *settings: str) -> loop.Outcome:
    return loop.run(
        tiny(*SETTINGS, *settings), directory, make=Poisoned, devices=DEVICES, data=tokens
    )


def events(directory: Path, name: str) -> list[dict]:
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


@pytest.fixture(scope="module")
def skipped(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("skipped")
    assert run(directory, *SKIP) == loop.Outcome("finished", STEPS)
    return directory


def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(skipped):
    setup = shard(tiny(*SETTINGS, *SKIP), Poisoned, DEVICES)
    states = {step: restore.restore(skipped, setup, step) for step in range(1, STEPS + 1)}
    assert_same_bits(states[BAD].params, states[BAD - 1].params)
    assert_same_bits(states[BAD].opt_state, states[BAD - 1].opt_state)
    assert_same_bits(states[BAD].items["ema"], states[BAD - 1].items["ema"])
    for step in (2, 4, 5):
        with pytest.raises(AssertionError):
            assert_same_bits(states[step].params, states[step - 1].params)
        with pytest.raises(AssertionError):
            assert_same_bits(states[step].items["ema"], states[step - 1].items["ema"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states[STEPS].params))


def test_it_says_which_samples(skipped):
    [event] = events(skipped, "skipped")
    assert (event["step"], event["samples"]) == (BAD, [8, 11])
    lines = [json.loads(line) for line in (skipped / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0]


def test_by_default_the_run_ends(tmp_path):
    with pytest.raises(DivergedError, match=f"the loss of step {BAD} is nan"):
        run(tmp_path)
    [event] = events(tmp_path, "diverged")
    assert (event["step"], event["samples"]) == (BAD, [8, 11])


def test_a_gradient_that_is_too_large_is_skipped_so_often_and_no_more(tmp_path):
    wrong = (
        "guard.policy=skip",
        "guard.grad_norm=1e-6",
        "guard.most_skipped=2",
        "checkpoint.every=0",
    )
    with pytest.raises(
        DivergedError,
        match="gradient norm of step 3 is .*|step 3 is nan, and the 2 before it were skipped",
    ):
        run(tmp_path, *wrong)
    assert [event["step"] for event in events(tmp_path, "skipped")] == [1, 2]
    assert "above 1e-06" in events(tmp_path, "skipped")[0]["why"]
