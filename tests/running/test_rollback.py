"""Bad steps in a row: the run goes back to the checkpoint before them and is as if their samples
had never been.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, tiny

from spmdtrain.checkpoints import restore
from spmdtrain.config.errors import ConfigError, DivergedError
from spmdtrain.running import loop, rollback
from spmdtrain.train.shard import shard

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

POISON = 63  # a token id
BATCH, STEPS = 4, 12
FIRST, LAST = 7, 9  # steps whose batches are poisoned
SAVED = 6
LEFT_OUT = [BATCH * SAVED, BATCH * LAST - 1]
SETTINGS = (
    "model.layers=1",
    "model.embed=16",
    "optimizer.schedule=constant",
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    "guard.policy=rollback",
    "guard.most_skipped=2",
    "checkpoint.every=2",
)


def tokens_with(bad: range):
    """Samples by their index; the first of each step in `bad` is poisoned."""

    def tokens(_seed: int, index: int) -> np.ndarray:
        ids = np.random.default_rng(index).integers(0, POISON, 17, np.int32)
        if index % BATCH == 0 and index // BATCH + 1 in bad:
            ids[5] = POISON
        return ids

    return tokens


def without_the_bad(seed: int, index: int) -> np.ndarray:
    """The same, had the samples that are left out never been."""
    first, last = LEFT_OUT
    return tokens_with(range(0))(seed, index if index < first else index + last - first + 1)


def poisoned(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.where(targets == POISON, jnp.nan, losses)


def run(directory: Path, data=None, stop: int = 0) -> loop.Outcome:
    """`stop`: a hook asks to, once, when it sees this step."""
    asked = []

    def hook(event, step, _):
        if event == "step" and step == stop and not asked:
            asked.append(step)
            return True

    data = data or tokens_with(range(FIRST, LAST + 1))
    one = jax.devices()[:1]
    return loop.run(tiny(*SETTINGS), directory, devices=one, data=data, loss=poisoned, hooks=[hook])


def lines(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def events(directory: Path, name: str) -> list[dict]:
    return [line for line in lines(directory, "events.jsonl") if line["event"] == name]


def losses(directory: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(directory, "metrics.jsonl")]


def state_of(directory: Path):
    return restore.restore(directory, shard(tiny(*SETTINGS), devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, data=without_the_bad)
    assert not events(directory, "skipped")
    return directory


def test_it_is_as_if_the_samples_had_never_been(undisturbed, tmp_path):
    assert run(tmp_path) == loop.Outcome("finished", STEPS)
    assert_same_bits(state_of(tmp_path), state_of(undisturbed))
    assert losses(tmp_path) == losses(undisturbed)
    [event] = events(tmp_path, "rolled_back")
    assert (event["step"], event["to_step"], event["samples"]) == (LAST, SAVED, LEFT_OUT)
    assert [event["step"] for event in events(tmp_path, "skipped")] == [7, 8]
    assert [event["step"] for event in events(tmp_path, "saved")] == [2, 4, 6, 8, 10, 12]


# At 7 the run ends among the bad steps and saves them, at 8 it goes back first; at 10 it has gone
# back.
@pytest.mark.parametrize("stop", [7, 8, 10])
def test_a_resumed_run_is_no_other(stop, undisturbed, tmp_path):
    assert run(tmp_path, stop=stop).status == "stopped"
    assert run(tmp_path) == loop.Outcome("finished", STEPS)
    assert losses(tmp_path) == losses(undisturbed)
    assert_same_bits(state_of(tmp_path), state_of(undisturbed))
    assert len(events(tmp_path, "rolled_back")) == 1
    meta = json.loads((tmp_path / "checkpoints" / str(STEPS) / "meta" / "metadata").read_text())
    assert meta["guard"] == {"in_a_row": 0, "left_out": [LEFT_OUT]}


def test_exports_of_the_bad_steps_are_set_aside(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(rollback, "set_aside_exports", lambda after, _: asked.append(after))
    run(tmp_path)
    assert asked == [SAVED]


def test_a_cause_that_is_not_in_the_samples_ends_the_run(tmp_path):
    with pytest.raises(DivergedError, match=f"back to step {SAVED} {rollback.MOST_RETURNS} times"):
        run(tmp_path, data=tokens_with(range(FIRST, 1000)))
    found = [event["samples"] for event in events(tmp_path, "rolled_back")]
    assert found == [[24, 35], [24, 47], [24, 59]]


def test_without_an_older_checkpoint_the_run_ends(tmp_path):
    with pytest.raises(
        DivergedError,
        match="the loss of step 3 is nan, and the 2 before it were skipped, and no checkpoint",
    ):
        run(tmp_path, data=tokens_with(range(1, 1000)))


def test_a_run_that_never_saves_has_nothing_to_go_back_to():
    with pytest.raises(ConfigError, match="checkpoint.every=0 saves none during the run"):
        tiny(*SETTINGS, "checkpoint.every=0")
