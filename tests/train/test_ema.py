"""The average of the weights: what numpy says it is, on any mesh, through a checkpoint, and
wherever weights are read.
"""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_same_bits,
    batches_of,
    compiled_step,
    mesh_of,
    prepared,
    tiny,
)

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.config import CheckpointError
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.fresh import init_state
from spmdtrain.train.items import ema
from spmdtrain.train.state import TrainState

pytestmark = pytest.mark.long

DECAY = 0.7
STEPS = 4
# Momentum alone, so that a weight is as exact as its gradient; a vocabulary that is padded.
NUMBERS = (
    "model.embed=16",
    "model.heads=2",
    "model.vocab=67",
    "train.sequence_length=8",
    "optimizer.name=sgd",
    "optimizer.learning_rate=0.3",
    "optimizer.schedule=constant",
    f"optimizer.ema={DECAY}",
)
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "train.zero=1")
PIPELINE = ("mesh.pipeline=2", "mesh.data=2", "train.zero=1", "train.microbatch=4")
Weights = dict[str, np.ndarray]


def oracle(weights: Sequence[Weights], decay: float = DECAY) -> Weights:
    """The average that begins with the first of these weights and sees the others, in float64."""
    first, *others = weights
    found = {path: np.asarray(x, np.float64) for path, x in first.items()}
    for each in others:
        for path, x in each.items():
            found[path] = decay * found[path] + (1 - decay) * np.asarray(x, np.float64)
    return found


def assert_close(got: Weights, want: Weights, tolerance: float) -> None:
    """Relative to the largest of each tensor."""
    assert got.keys() == want.keys()
    for path in want:
        worst = np.max(np.abs(got[path] - want[path])) / np.max(np.abs(want[path]))
        assert worst <= tolerance, f"{path}: {worst}"


def far_apart(ours: Weights, theirs: Weights) -> bool:
    """True if they differ by far more than rounding; a norm hardly moves in four steps."""
    difference = {path: np.asarray(ours[path] - theirs[path], np.float64) for path in theirs}
    return _norm(difference) > 1e-2 * _norm(theirs)


def _norm(tree: Weights) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in tree.values())))


@cache
def followed(*settings: str) -> tuple[list[Weights], TrainState]:
    """(the weights before the first step and after each, the last state) on one device."""
    setup = prepared(*settings)
    state = init_state(setup)
    seen = [jax.device_get(state.params)]
    with batches_of(setup) as ahead:
        for _ in range(STEPS):
            state, _ = compiled_step(*settings)(state, next(ahead))
            seen.append(jax.device_get(state.params))
    return seen, state


def test_it_is_that_of_numpy():
    seen, state = followed(*NUMBERS)
    got = jax.device_get(state.items["ema"])
    assert_close(got, oracle(seen), 1e-6)
    assert far_apart(got, seen[0]) and far_apart(got, seen[-1])


def test_it_is_float32_whatever_the_weights_are():
    """In bfloat16 no step of it would be large enough to move it."""
    decay = 0.999
    draws = np.random.default_rng(0).normal(1, 0.1, (50, 100))
    weights = [{"w": jnp.asarray(draw, jnp.bfloat16)} for draw in draws]
    average = ema.begin(weights[0], ["w"])
    assert average["w"].dtype == jnp.float32
    for each in weights[1:]:
        average = ema.update(average, decay, each)
    assert average["w"].dtype == jnp.float32
    assert_close(jax.device_get(average), oracle(jax.device_get(weights), decay), 1e-6)


# A run and its files

FILES = ("checkpoint.every=1", "checkpoint.keep=9")
EVALUATED = ("eval.every=4", "eval.batches=2")


def run(directory: Path, *settings: str) -> None:
    config = tiny(*NUMBERS, *FILES, f"train.steps={STEPS}", *settings)
    devices = jax.devices()[: mesh_of(settings)]
    assert st.run(config, directory, devices=devices).status == "finished"


def restored(directory: Path, *settings: str, step: int | None = None) -> TrainState:
    return st.restore(directory, prepared(*NUMBERS, *settings), step)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("averaged") / "run"
    run(directory, *MESH, *EVALUATED)
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "run"
    run(directory, "optimizer.ema=none", "train.steps=2")
    return directory


def back_to(step: int, source: Path, directory: Path) -> None:
    """A copy of a run as it stood after so many steps."""
    shutil.copytree(source, directory)
    for folder in (directory / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)


def evaluations(directory: Path) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line for line in lines if "eval_loss" in line}
    for line in found.values():
        del line["time"]  # the wall clock's
    return found


def test_on_a_mesh_it_rests_as_the_weights_do_and_is_that_of_one_device(averaged):
    setup = prepared(*NUMBERS, *MESH)
    state = restored(averaged, *MESH)
    assert_close(
        plain_arrays(setup, state.items["ema"]),
        jax.device_get(followed(*NUMBERS)[1].items["ema"]),
        1e-6,
    )
    for path, average in state.items["ema"].items():
        assert setup.state.items["ema"][path].sharding == setup.state.params[path].sharding
        assert average.shape == state.params[path].shape
        padded = setup.padding.to_rest(path, setup.padding.from_rest(path, np.asarray(average)))
        assert np.array_equal(padded, average), f"{path}: padding is no longer zero"
    assert setup.padding.at_rest["tokens.table_ve"] != setup.padding.of_model["tokens.table_ve"]


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(averaged, tmp_path):
    back_to(2, averaged, tmp_path / "run")
    run(tmp_path / "run", *MESH, *EVALUATED)
    got, want = restored(tmp_path / "run", *MESH), restored(averaged, *MESH)
    assert want.items["ema"]
    assert_same_bits(got, want)
    assert evaluations(tmp_path / "run")[STEPS] == evaluations(averaged)[STEPS]


def test_a_pipeline_reads_the_same_bits_and_goes_on_as_one_device_does(averaged, tmp_path):
    here = plain_arrays(prepared(*NUMBERS, *MESH), restored(averaged, *MESH, step=2).items["ema"])
    there = plain_arrays(
        prepared(*NUMBERS, *PIPELINE), restored(averaged, *PIPELINE, step=2).items["ema"]
    )
    assert_same_bits(there, here)
    back_to(2, averaged, tmp_path / "run")
    run(tmp_path / "run", *PIPELINE)
    want = jax.device_get(followed(*NUMBERS)[1].items["ema"])
    assert_close(st.weights(tmp_path / "run", ema=True), want, 1e-6)


def test_wherever_weights_are_read_the_average_can_be(averaged, capsys):
    """`weights`, `open_run`, `evaluate`, `generate`, `eval --ema` and the evaluation of the run."""
    begin = jax.device_get(followed(*NUMBERS)[0][0])
    weights = [begin, *(st.weights(averaged, step) for step in range(1, STEPS + 1))]
    average = st.weights(averaged, ema=True)
    assert_close(average, oracle(weights), 1e-6)
    assert far_apart(average, weights[-1])
    assert_same_bits(jax.device_get(st.open_run(averaged, ema=True).params), average)

    opened = st.open_run(averaged)
    logits = st.make_logits(opened.setup)
    plain_loss = evaluations(averaged)[STEPS]["eval_loss"]
    loss = evaluations(averaged)[STEPS]["eval_loss_ema"]
    assert abs(loss - plain_loss) > 1e-3
    same = ["eval.batches=2", "train.global_batch=16"]
    assert st.evaluate(averaged, overrides=same)["loss"] == pytest.approx(plain_loss, rel=1e-6)
    assert main(["eval", str(averaged), "--ema", "--json", *_set(same)]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, rel=1e-6)

    prompt = np.arange(4)
    made = st.generate(averaged, prompt, 1, choice=st.Choice(0), ema=True)
    assert made[-1] == np.asarray(logits(average, prompt[None]))[0, -1].argmax()


def _set(overrides: Sequence[str]) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def test_a_run_without_one_that_is_asked_for_it_costs_one_line(plain, capsys):
    said = r"checkpoint .*/2 holds no average of the weights; .*optimizer.ema=none .*; try"
    ids = np.arange(4)
    for ask in (
        lambda: st.weights(plain, ema=True),
        lambda: st.open_run(plain, ema=True),
        lambda: st.evaluate(plain, ema=True),
        lambda: st.generate(plain, ids, 1, ema=True),
        lambda: restored(plain),
    ):
        with pytest.raises(CheckpointError, match=said):
            ask()
    assert main(["sample", str(plain), "--ema"]) == CheckpointError.exit_code
    out = capsys.readouterr()
    assert len((out.out + out.err).splitlines()) == 1


def test_it_may_begin_on_the_way_and_end_and_the_run_says_so(plain, tmp_path, capsys):
    back_to(2, plain, tmp_path / "run")
    run(tmp_path / "run")
    assert f"changed since step 2: optimizer.ema: none, now {DECAY}" in capsys.readouterr().out
    weights = [st.weights(tmp_path / "run", step) for step in range(2, STEPS + 1)]
    assert_close(st.weights(tmp_path / "run", ema=True), oracle(weights), 1e-6)

    run(tmp_path / "run", "optimizer.ema=none", f"train.steps={STEPS + 1}")
    assert f"optimizer.ema: {DECAY}, now none" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no average"):
        st.weights(tmp_path / "run", ema=True)


def test_it_begins_with_the_weights_of_another_run(plain, tmp_path):
    run(tmp_path / "run", f"train.init_from={plain}", "train.steps=1")
    weights = [st.weights(plain), st.weights(tmp_path / "run")]
    assert_close(st.weights(tmp_path / "run", ema=True), oracle(weights), 1e-6)
