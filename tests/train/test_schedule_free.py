"""Schedule-free AdamW is that of optax, and what is saved and evaluated is its average."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, batches_of, mesh_of, prepared, tiny
from optax import contrib

import spmdtrain as st
from spmdtrain.config import AdamW, ConfigError
from spmdtrain.config.schema import ScheduleFreeAdamW
from spmdtrain.data.source import open_data
from spmdtrain.models.abstract import Parameter
from spmdtrain.planner.cost.memory import step_memory
from spmdtrain.planner.cost.workload import MeshShape, workload_of
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard
from spmdtrain.train.step import make_gradients
from spmdtrain.train.updates import optimizers
from spmdtrain.train.updates.parameter_kinds import is_matrix
from spmdtrain.train.updates.shipped_optimizers import shipped_update_rules

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

STEPS = 4
NUMBERS = (
    "optimizer.name=schedule_free_adamw",
    "optimizer.weight_decay=0.1",
    "optimizer.learning_rate=3e-2",
    "optimizer.warmup=2",
    "optimizer.epsilon=0.1",  # a gradient that is 0 but for rounding stays so
)
MESH = ("mesh.pipeline=2", "mesh.data=2", "mesh.fsdp=2", "train.zero=1", "train.microbatch=2")
Weights = dict[str, jax.Array]


def of_optax(
    config: ScheduleFreeAdamW, matrices: dict[str, bool], rate: Callable
) -> optax.GradientTransformation:
    """optax's own. `rate` is of the 0-based step; optax asks with 1 at the first for its weights.

    The base counts from 0, so that it is asked alike.
    """
    base = optax.chain(
        optax.scale_by_rms(config.beta2, config.epsilon, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(config.weight_decay, matrices),
        optax.scale_by_learning_rate(rate),
    )
    return contrib.schedule_free(base, lambda count: rate(count - 1), config.beta1)


def assert_close(got, want, tolerance: float) -> None:
    """Relative to the largest of each tensor."""
    assert got.keys() == want.keys()
    for path in want:
        worst = np.max(np.abs(got[path] - want[path])) / np.max(np.abs(want[path]))
        assert worst <= tolerance, f"{path}: {worst}"


def test_it_is_that_of_optax_with_rates_of_groups_and_frozen_weights():
    shapes = {
        "up": Parameter((3, 4, 5), ("layer", "embed", "ffn")),
        "slow": Parameter((4, 5), ("embed", "ffn")),
        "scale": Parameter((3, 4), ("layer", "norm")),
        "still": Parameter((7, 4), ("vocab", "embed")),
    }
    config = ScheduleFreeAdamW(
        weight_decay=0.3,
        groups=[{"match": "still", "frozen": True}, {"match": "slow", "rate": 0.1}],
    )
    keys = jax.random.split(jax.random.key(0), 2 * len(shapes))
    begin = {
        path: jax.random.normal(key, shapes[path].shape)
        for path, key in zip(shapes, keys, strict=False)
    }
    least = {
        path: jax.random.normal(key, shapes[path].shape)
        for path, key in zip(shapes, keys[len(shapes) :], strict=True)
    }
    gradient = jax.grad(lambda w: sum(jnp.sum((w[path] - least[path]) ** 4) for path in w))
    rates = jnp.array([0.02, 0.05, 0.01, 0.06, 0.03])
    rate = lambda step: rates[step]  # noqa: E731

    rules = shipped_update_rules(config, shapes)
    x = dict(begin)
    state = optimizers.init(rules, shapes, x)
    for step in range(len(rates)):
        at = gradient(optimizers.gradient_points(rules, x, state))
        at = {path: at[path] for path in rules}
        found, state = optimizers.updates(rules, shapes, at, state, x, rate(step))
        moved = {
            path: x[path] - optimizers.scaled(rules[path], update, rate(step))
            for path, update in found.items()
        }
        x = x | moved

    for path in shapes:
        if path == "still":
            assert np.array_equal(x[path], begin[path])
            continue
        own = lambda step, path=path: rate(step) * (0.1 if path == "slow" else 1)  # noqa: E731
        reference = of_optax(config, {path: is_matrix(path, shapes[path])}, own)
        y = {path: begin[path]}
        want = reference.init(y)
        for _ in range(len(rates)):
            at = gradient(begin | y)
            update, want = reference.update({path: at[path]}, want, y)
            y = optax.apply_updates(y, update)
        average = contrib.schedule_free_eval_params(want, y)
        assert_close({path: x[path]}, average, 1e-6)
        far = np.max(np.abs(y[path] - average[path]))
        assert far > 1e-4, "the test could not tell the two apart"


@cache
def reference() -> tuple[np.ndarray, Weights, Weights]:
    """(losses, x, y) of optax's own after the steps of the tiny run, on one device."""
    setup = prepared(*NUMBERS)
    config = setup.config.optimizer
    assert isinstance(config, ScheduleFreeAdamW)
    matrices = {path: is_matrix(path, each) for path, each in setup.model.parameters.items()}
    rule = of_optax(config, matrices, setup.learning_rate)
    find = jax.jit(make_gradients(setup))
    y = init_state(setup).params
    state = rule.init(y)
    losses = []
    with batches_of(setup) as ahead:
        for step in range(STEPS):
            gradients, sums = find(y, jnp.int32(step), next(ahead))
            losses.append(float(sums["loss"] / sums["tokens"]))
            gradients, _ = optimizers.clip(gradients, setup.config.train.clip)
            update, state = rule.update(gradients, state, y)
            y = optax.apply_updates(y, update)
    return np.array(losses), contrib.schedule_free_eval_params(state, y), y


# A run and its files


def run(directory: Path, *settings: str) -> None:
    files = ("checkpoint.every=2", "eval.every=4", "eval.batches=2", f"train.steps={STEPS}")
    config = tiny(*NUMBERS, *files, *settings)
    devices = jax.devices()[: mesh_of(settings)]
    assert st.run(config, directory, devices=devices).status == "finished"


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("schedule_free") / "run"
    run(directory, *MESH)
    return directory


def test_a_run_in_a_pipeline_saves_and_evaluates_the_average_of_one_device(split):
    """Its losses are at y, as are those of optax."""
    losses, x, y = reference()
    assert_close(st.weights(split), jax.device_get(x), 1e-6)
    lines = [json.loads(line) for line in (split / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    reported = next(line["eval_loss"] for line in lines if "eval_loss" in line)
    same = ["eval.batches=2", "train.global_batch=16"]
    assert st.evaluate(split, overrides=same)["loss"] == pytest.approx(reported, rel=1e-6)
    config, data = open_data(tiny(*NUMBERS, "eval.batches=2"))
    setup = shard(config, devices=jax.devices()[:1])
    evaluate = st.make_evaluate(setup, data)
    state = init_state(setup)
    at_x, at_y = (evaluate(replace(state, params=params)) for params in (x, y))
    assert reported == pytest.approx(at_x, rel=1e-6)
    assert abs(at_y - at_x) > 1e-4 * at_x, "the test could not tell the two apart"


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(split, tmp_path):
    shutil.copytree(split, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    run(tmp_path / "run", *MESH)
    setup = prepared(*NUMBERS, *MESH)
    assert_same_bits(st.restore(tmp_path / "run", setup), st.restore(split, setup))


def test_a_run_from_the_weights_of_another_begins_all_its_points_there(split, tmp_path):
    """A z of its own initialisation would pull the average there at the first step."""
    run(tmp_path / "run", *MESH, f"train.init_from={split}", "train.steps=2", "train.seed=1")
    begin, after = st.weights(split), st.weights(tmp_path / "run")
    rate = tiny(*NUMBERS).optimizer.learning_rate
    for path in begin:
        assert np.max(np.abs(after[path] - begin[path])) < 2 * rate


def test_the_planner_counts_the_point_of_the_gradients():
    """z is a moment, and float32 weights have no other copy in compute precision."""
    adamw, ours = (
        step_memory(workload_of(tiny(*name).with_vocab(64), MeshShape().sizes))
        for name in ((), NUMBERS)
    )
    assert ours.optimizer == adamw.optimizer
    assert ours.total - adamw.total == pytest.approx(adamw.parameters, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("optimizer.schedule=cosine",),
            "optimizer.schedule='cosine': the average .*schedule='constant'",
        ),
        (("precision.params=bfloat16",), "precision.params='bfloat16': .*params='float32'"),
    ],
)
def test_what_would_undo_the_average_is_one_line(settings, said):
    with pytest.raises(ConfigError, match=said) as caught:
        tiny(*NUMBERS, *settings)
    assert len(str(caught.value).splitlines()) == 1
    assert AdamW().schedule == "cosine"
