"""Which checkpoints of a run stay, and going back to one of them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same_bits, tiny
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.checkpoints.restore import weights
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config import CheckpointError, ConfigError
from spmdtrain.config.errors import DamagedError
from spmdtrain.config.run_files import steps_in
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.data.source import open_data
from spmdtrain.launch.launch import resume_command
from spmdtrain.running import loop
from spmdtrain.running.save_state import save
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard

pytestmark = pytest.mark.usefixtures("shared_programs")

SETTINGS = (
    "train.steps=8",
    "train.global_batch=2",
    "model.layers=1",
    "optimizer.schedule=constant",
    "checkpoint.every=2",
    "eval.every=1",
    "eval.batches=1",
)


def run(directory: Path, *overrides: str, **options) -> loop.Outcome:
    config = tiny(*SETTINGS, *overrides)
    return loop.run(config, directory, devices=jax.devices()[:1], **options)


def figures(directory: Path, name: str) -> dict[int, float]:
    text = (directory / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return {line["step"]: line[name] for line in found if name in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was never stopped, with all of its checkpoints."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(directory, "checkpoint.keep=9")
    return directory


def evaluations(monkeypatch, losses: list[float]) -> None:
    """The evaluation after step n says `losses[n - 1]`."""

    def make(*_):
        return lambda state: {
            "eval_loss": losses[int(state.step) - 1],
            "eval_tokens": 1,
            "eval_split_tokens": 1,
        }

    monkeypatch.setattr(loop, "make_eval_figures", make)


CONFIGS = st.builds(
    CheckpointConfig,
    keep=st.integers(1, 3) | st.just("best"),
    keep_best=st.integers(0, 3),
    keep_every=st.integers(0, 7),
)


@pytest.mark.core
@given(CONFIGS, st.lists(st.none() | st.sampled_from([1.0, 2.0, 3.0, float("nan")]), max_size=30))
def test_those_stay_that_brute_force_finds_wherever_the_run_is_resumed(config, losses):
    """One that is resumed after each save decides as one that never stopped."""
    going = Retention(config)
    there: list[int] = []
    newest = 1 if config.keep == "best" else config.keep
    best = max(config.keep_best, config.keep == "best")
    saved: list[int] = []
    for step, loss in enumerate(losses, 1):
        going.evaluated(step, {} if loss is None else {"eval_loss": loss})
        meta = json.loads(json.dumps(going.meta([*there, step])))
        stay = going.stay([*there, step])
        resumed = Retention(config)
        resumed.recall(meta)
        assert resumed.stay([*there, step]) == stay
        saved.append(step)
        there = sorted(stay)
        going = resumed

        known = [(losses[each - 1], each) for each in saved if losses[each - 1] in (1.0, 2.0, 3.0)]
        asked = {*saved[-newest:], *(each for _, each in sorted(known)[:best])}
        if config.keep_every:
            asked |= {each for each in saved if each % config.keep_every == 0}
        assert set(there) == asked


def test_without_a_checkpoint_at_its_beginning_a_stretch_keeps_its_first():
    retention = Retention(CheckpointConfig(keep=1, keep_every=100))
    assert retention.stay([70, 140, 210, 280, 350]) == {140, 210, 350}


@pytest.mark.parametrize("losses", [None, [], {"x": 1.0, "9" * 5000: 2.0, "9": "low"}])
def test_a_meta_without_losses_recalls_none(losses):
    retention = Retention(CheckpointConfig(keep="best"))
    retention.recall({"eval_losses": losses})
    assert retention.best([9]) is None


@pytest.mark.long
@pytest.mark.parametrize("stop", [0, 4])
def test_the_best_stays_and_is_saved_where_it_is_not_due(tmp_path, monkeypatch, capsys, stop):
    evaluations(monkeypatch, [5.0, 4.0, 1.0, 4.0, 4.0, float("nan"), 4.0, 4.0])
    if stop:
        hook = lambda event, step, _: event == "step" and step == stop  # noqa: E731
        assert run(tmp_path, "checkpoint.keep=best", hooks=[hook]).step == stop
        assert steps_in(tmp_path) == [3, 4]
    run(tmp_path, "checkpoint.keep=best")
    assert steps_in(tmp_path) == [3, 8]
    assert "the best is step 3, eval loss 1.0000" in capsys.readouterr().out
    assert weights(tmp_path, 3)


@pytest.mark.long
def test_a_state_that_is_saved_by_hand_forgets_no_best(tmp_path, monkeypatch):
    evaluations(monkeypatch, [5.0, 1.0, 4.0, 4.0, 4.0, 4.0])
    run(tmp_path, "checkpoint.keep=best", "train.steps=4")
    setup = shard(open_data(tiny(*SETTINGS))[0], devices=jax.devices()[:1])
    save(setup, replace(init_state(setup), step=jnp.int32(5)), tmp_path)
    run(tmp_path, "checkpoint.keep=best", "train.steps=6")
    assert steps_in(tmp_path) == [2, 6]


@pytest.mark.long
def test_one_of_each_stretch_stays(tmp_path):
    run(tmp_path, "checkpoint.keep=1", "checkpoint.keep_every=4", "checkpoint.every=1")
    assert steps_in(tmp_path) == [4, 8]


@pytest.mark.parametrize("setting", ["checkpoint.keep=best", "checkpoint.keep_best=1"])
def test_the_best_without_an_evaluation_is_refused(setting):
    with pytest.raises(ConfigError, match=r"set eval.every=100"):
        tiny(setting)


@pytest.mark.long
def test_going_back_takes_the_steps_again_and_deletes_nothing(whole, tmp_path, capsys):
    losses = figures(whole, "loss")
    run(tmp_path, "checkpoint.keep=9")
    before = weights(tmp_path, 8)
    run(tmp_path, "checkpoint.keep=9", step=4)
    assert "went back to step 4: 6, 8 are now in checkpoints/quarantine" in capsys.readouterr().out
    assert figures(tmp_path, "loss") == losses
    assert_same_bits(weights(tmp_path, 8), before)
    aside = tmp_path / "checkpoints" / "quarantine"
    assert sorted(path.name for path in aside.iterdir()) == ["6", "8"]
    run(tmp_path, "checkpoint.keep=9", "optimizer.learning_rate=1e-3", step=6)
    assert figures(tmp_path, "loss")[8] != losses[8]
    assert sorted(path.name for path in aside.iterdir()) == ["6", "8", "8.1"]


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("options", "overrides", "match"),
    [
        ({"step": 5}, (), r"no checkpoint of step 5; found 2, 4, 6, 8; try --step 8"),
        ({"step": 8}, (), r"nothing to train; .*; try --set train.steps=16"),
        ({"step": 4, "fresh": True}, (), r"--fresh starts a new one"),
    ],
)
@pytest.mark.long
def test_a_step_that_cannot_be_gone_back_to_changes_nothing(whole, options, overrides, match):
    before = contents(whole)
    with pytest.raises((CheckpointError, ConfigError), match=match):
        run(whole, *overrides, **options)
    assert contents(whole) == before


@pytest.mark.long
def test_a_length_in_epochs_is_counted_before_a_step_is_chosen(whole):
    before = contents(whole)
    config = tiny(*SETTINGS[1:], "train.epochs=0.0001", "optimizer.warmup=0")
    with pytest.raises(ConfigError, match=r"nothing to train; asked train.steps=[1-4];"):
        loop.run(config, whole, devices=jax.devices()[:1], step=4)
    assert contents(whole) == before


@pytest.mark.long
def test_a_damaged_step_that_was_chosen_is_refused(whole):
    meta = whole / "checkpoints" / "6" / "meta" / "metadata"
    text = meta.read_bytes()
    try:
        meta.write_bytes(text[:-9])
        with pytest.raises(DamagedError, match="try --step 8"):
            run(whole, step=6)
        assert steps_in(whole) == [2, 4, 6, 8]
    finally:
        meta.write_bytes(text)


def test_a_run_that_does_not_exist_has_no_step(tmp_path):
    with pytest.raises(CheckpointError, match="found none; try training first, without --step"):
        run(tmp_path / "none", step=4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "again", [["--fresh"], ["--fre"], ["--step", "4"], ["--step=4"], ["--st", "4"]]
)
def test_the_launcher_goes_on_in_its_next_attempt(again):
    rest = ["train", "a.toml", "--set", "train.steps=9", "--simulate-devices", "2", "--run", "r"]
    assert resume_command([*rest, *again]) == rest
    assert resume_command([*rest[:2], *again, *rest[2:]]) == rest
