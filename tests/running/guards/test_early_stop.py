"""A run that ends when its evaluations get no better, and the evaluation before its first step."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.config import ConfigError
from spmdtrain.config.schema import EvalConfig
from spmdtrain.running import loop
from spmdtrain.running.guards.early_stop import EarlyStop

pytestmark = pytest.mark.usefixtures("shared_programs")

SETTINGS = (
    "model.layers=1",
    "model.embed=8",
    "model.heads=1",
    "train.steps=20",
    "train.global_batch=4",
    "eval.every=2",
    "eval.batches=2",
    "checkpoint.every=3",
)


def run(directory: Path, *settings: str, **options) -> loop.Outcome:
    return loop.run(tiny(*SETTINGS, *settings), directory, devices=jax.devices()[:1], **options)


def lines(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


@pytest.fixture
def evaluated(monkeypatch) -> list[int]:
    """The steps of evaluations; their losses fall to step 4 and are above that from then on."""
    seen: list[int] = []

    def make_eval_figures(*_):
        def figures(state):
            step = int(state.step)
            seen.append(step)
            counts = {"eval_tokens": 1, "eval_split_tokens": 1}
            return {"eval_loss": 4.0 - step if step <= 4 else 1.0} | counts

        return figures

    monkeypatch.setattr(loop, "make_eval_figures", make_eval_figures)
    return seen


@given(
    losses=st.lists(st.none() | st.integers(0, 9), max_size=20),
    patience=st.integers(1, 5),
    delta=st.sampled_from([0.0, 1.0, 2.5]),
    cut=st.integers(0, 20),
)
def test_it_ends_where_a_plain_search_says_and_a_resume_changes_nothing(
    losses, patience, delta, cut
):
    config = EvalConfig(every=1, patience=patience, min_delta=delta)
    found = EarlyStop(config)
    over = None
    for at, loss in enumerate(losses):
        if at == cut:
            found = EarlyStop(config, json.loads(json.dumps(found.document())))
        found.evaluated({} if loss is None else {"eval_loss": float(loss)})
        if found.is_over:
            over = at
            break

    improved = -1
    want = None
    best = None
    for at, loss in enumerate(losses):
        if loss is not None and (best is None or best - loss > delta):
            best, improved = loss, at
        if at - improved == patience:
            want = at
            break
    assert over == want


@pytest.mark.long
def test_a_run_stops_after_the_patience_and_goes_on_with_more(tmp_path, evaluated, capsys):
    """It is stopped after step 7 and resumed there: the evaluation of step 6 still counts."""
    hooks = [lambda event, step, _: event == "step" and step == 6]
    assert run(tmp_path, "eval.patience=3", hooks=hooks).status == "stopped"
    assert run(tmp_path, "eval.patience=3") == loop.Outcome("stopped_early", 10)
    assert evaluated == [2, 4, 6, 8, 10]
    why = "3 evaluations in a row and none below the best, 0.0000"
    ending = f"stopped early after 10 steps: {why}; everything is in {tmp_path}"
    assert ending in capsys.readouterr().out
    *_, last, ended = lines(tmp_path, "events.jsonl")
    assert (last["event"], last["step"]) == ("stopped_early", 10)
    assert (ended["event"], ended["exit_code"]) == ("ended", 0)
    assert (tmp_path / "checkpoints" / "10").is_dir()

    assert run(tmp_path, "eval.patience=3") == loop.Outcome("nothing to do", 10)
    said = capsys.readouterr().out
    assert f"has stopped early at step 10: {why}; to continue: --set eval.patience=6" in said
    assert run(tmp_path, "eval.patience=6") == loop.Outcome("stopped_early", 16)


@pytest.mark.seconds
def test_the_evaluation_before_the_first_step_is_of_the_first_weights(tmp_path):
    """It changes nothing else, is not made by a resumed run, and stands there once."""
    with pytest.raises(KeyboardInterrupt):  # before the first save
        run(tmp_path, "eval.at_start=true", hooks=[interrupting])
    start, first = lines(tmp_path, "metrics.jsonl")
    assert start["step"] == 0 and abs(start["eval_loss"] - np.log(64)) < 0.2
    hooks = [lambda event, step, _: event == "step" and step == 2]
    for stopping in hooks, []:
        run(tmp_path, "train.steps=4", "eval.at_start=true", hooks=stopping)
    figures = lines(tmp_path, "metrics.jsonl")
    assert [line["step"] for line in figures] == [0, 1, 2, 2, 3, 4, 4]
    assert figures[0] == start | {"time": figures[0]["time"]}

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "without", hooks=[interrupting])
    (plain,) = lines(tmp_path / "without", "metrics.jsonl")
    assert (plain["step"], plain["loss"]) == (1, first["loss"])


def interrupting(event: str, *_) -> None:
    if event == "step":
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("eval.patience=2", "eval.patience needs evaluations"),
        ("eval.at_start=true", "eval.at_start needs evaluations"),
        ("eval.min_delta=0.1", "without eval.patience"),
    ],
)
def test_what_says_nothing_alone_is_refused(setting, why):
    with pytest.raises(ConfigError, match=why):
        tiny(setting)
