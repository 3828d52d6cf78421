"""A step of a run, taken again: equal to the bit where the run was, and told where it was not."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import mesh_of, tiny

from spmdtrain import cli
from spmdtrain.config import CheckpointError, ConfigError, DataError
from spmdtrain.config.errors import UNEQUAL
from spmdtrain.lab.replay.opened import changed_setting, check_one_start
from spmdtrain.lab.replay.replay import replay
from spmdtrain.lab.replay.starts import flags_of
from spmdtrain.lab.replay.written import WrittenRun
from spmdtrain.running import loop
from spmdtrain.running.start import compiling

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

STEPS = 9
SETTINGS = (
    f"train.steps={STEPS}",
    "model.layers=1",
    "model.embed=16",
    "model.dropout=0.1",
    "optimizer.ema=0.9",
    "train.global_batch=8",
    "checkpoint.every=3",
    "checkpoint.keep=9",
)
MESH = ("mesh.data=2", "mesh.tensor=2", "train.zero=1")


def run(directory: Path, *overrides: str) -> Path:
    loop.run(tiny(*overrides), directory, devices=jax.devices()[: mesh_of(overrides)])
    return directory


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("ran") / "run", *SETTINGS, *MESH)


@pytest.fixture
def changed(ran, tmp_path):
    """A copy of the run; `change(step, name, factor)` falsifies a figure that it wrote."""
    copy = tmp_path / "run"
    shutil.copytree(ran, copy)

    def change(step: int, name: str, factor: float) -> Path:
        lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["step"] == step:
                line[name] *= factor
        (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return copy

    return change


@pytest.mark.parametrize(("step", "to", "start", "saved"), [(8, None, 6, []), (2, 6, 0, [3, 6])])
def test_a_step_comes_out_as_it_was_to_the_bit(ran, step, to, start, saved):
    found = replay(ran, step, to=to)
    assert (found.equal, found.start, found.last) == (True, start, to or step)
    assert list(found.leaves) == saved
    assert all(equal == of > 20 for equal, of in found.leaves.values())


def test_another_mesh_is_equal_but_for_rounding(ran, changed):
    elsewhere = ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=1", "train.zero=0")
    found = replay(ran, 8, overrides=elsewhere)
    assert found.equal
    assert found.apart < found.limit < 1e-4  # on some versions of XLA they are equal to the bit
    found = replay(changed(8, "loss", 1.0002), 8, overrides=elsewhere)
    assert (found.first.step, found.first.name) == (8, "loss")


def test_the_first_figure_that_differs_is_named(changed, capsys):
    falsified = changed(5, "grad_norm", 1 + 2**-22)
    found = replay(falsified, 6)
    assert (found.first.step, found.first.kind, found.first.name) == (5, "figure", "grad_norm")
    assert found.twice
    assert cli.main(["replay", str(falsified), "--step", "6"]) == UNEQUAL
    assert "step 5 differs: grad_norm" in capsys.readouterr().out


def test_other_tokens_are_told_before_other_figures(changed):
    falsified = changed(5, "loss", 1.5)
    lines = (falsified / "steps.jsonl").read_text().splitlines()
    assert len(lines) == STEPS
    fifth = json.loads(lines[4])
    assert (fifth["step"], fifth["samples"]) == (5, [32, 39])
    lines[4] = json.dumps(fifth | {"tokens": "0" * 16})
    (falsified / "steps.jsonl").write_text("\n".join(lines))
    found = replay(falsified, 6)
    assert (found.first.step, found.first.kind) == (5, "tokens")


def test_what_a_step_was_fed_is_shown_and_proved(ran, changed, capsys):
    inspect = ["data", "inspect", "--step", "5", "--json"]
    assert cli.main([*inspect, str(ran)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["equal_to_recorded"]) == ([32, 39], True)
    falsified = changed(5, "loss", 1.0)
    lines = (falsified / "steps.jsonl").read_text().splitlines()
    lines[4] = json.dumps(json.loads(lines[4]) | {"tokens": "0" * 16})
    (falsified / "steps.jsonl").write_text("\n".join(lines))
    assert cli.main([*inspect, str(falsified)]) == DataError.exit_code
    assert "was fed other tokens" in capsys.readouterr().err
    assert cli.main([*inspect, str(ran), "--set", "train.seed=3"]) == ConfigError.exit_code


@pytest.mark.parametrize(
    ("asked", "wrong", "said"),
    [
        ({"step": 10}, CheckpointError, "no figures of step 10; found steps up to 9"),
        ({"step": 0}, ConfigError, "step=0"),
        ({"step": 5, "to": 4}, ConfigError, "to=4 is before step=5"),
        (
            {"step": 5, "overrides": ("optimizer.beta1=0.5",)},
            ConfigError,
            "with the settings it was trained with",
        ),
        ({"step": 5, "overrides": ("mesh.data=8",)}, ConfigError, "needs 16 devices"),
    ],
)
def test_what_cannot_be_replayed_is_refused(ran, asked, wrong, said):
    with pytest.raises(wrong, match=said):
        replay(ran, **asked)


GONE = {"event": "rolled_back", "step": 5, "to_step": 3, "samples": [24, 39]}
RESUMED = {"event": "resumed", "step": 3, "from_step": 3}


@pytest.mark.parametrize(
    ("events", "step", "sample"),
    [([GONE], 3, 40), ([GONE], 6, 24), ([GONE, RESUMED], 3, 24), ([RESUMED, GONE], 3, 40)],
)
def test_a_run_that_went_back_is_replayed_without_what_it_left_out(events, step, sample):
    assert WrittenRun(Path("run"), {}, {}, events, []).sample_after(step, 24) == sample


@pytest.mark.parametrize(
    ("what", "kind", "name"),
    [
        ("weight", "leaf", "blocks.layer.mlp.up_ef"),
        ("moment", "leaf", "optimizer.blocks.layer.mlp.up_ef"),
        ("batch", "figure", "loss"),
    ],
)
def test_one_flipped_bit_is_found_with_its_step_and_leaf(tmp_path, monkeypatch, what, kind, name):
    with flipped(monkeypatch, 5, what):
        directory = run(tmp_path / "run", *SETTINGS, *MESH, "log.fingerprints=1")
    found = replay(directory, 6)
    assert (found.first.step, found.first.kind) == (5, kind)
    assert found.first.name.startswith(name)
    assert found.leaves[4][0] == found.leaves[4][1], "up to there all is equal"
    assert found.twice


@contextlib.contextmanager
def flipped(monkeypatch, at: int, what: str):
    """Flips one bit in step `at`: of a weight or a moment after it, or of its batch."""
    compile_step = compiling.compile_step
    path = "blocks.layer.mlp.up_ef"

    def flip(x: jax.Array) -> jax.Array:
        bits = np.array(x).view(np.uint32)
        bits.flat[3] ^= 1 if what == "batch" else 1 << 20
        return jax.device_put(bits.view(x.dtype), x.sharding)

    def planted(setup, lowered):
        step, report = compile_step(setup, lowered)

        def broken(state, batch):
            number = int(state.step) + 1
            if number == at and what == "batch":
                batch = batch | {"targets": flip(batch["targets"])}
            state, metrics = step(state, batch)
            if number == at and what == "weight":
                state = replace(state, params=state.params | {path: flip(state.params[path])})
            if number == at and what == "moment":
                moments, tree = jax.tree.flatten(state.opt_state[path])
                largest = max(range(len(moments)), key=lambda place: moments[place].size)
                moments[largest] = flip(moments[largest])
                opt_state = state.opt_state | {path: jax.tree.unflatten(tree, moments)}
                state = replace(state, opt_state=opt_state)
            return state, metrics

        return broken, report

    with monkeypatch.context() as patched:
        patched.setattr(compiling, "compile_step", planted)
        yield


def test_of_the_flags_of_a_start_those_that_write_files_are_left_out():
    text = "--xla_a=true --xla_dump_to=/tmp/x --xla_b_count=8 --xla_c=../y --other=1 rm"
    assert flags_of({"xla_flags": text}) == "--xla_a=true --xla_b_count=8"
    assert flags_of({"xla_flags": 3}) == flags_of(None) == ""


def test_a_step_has_the_settings_of_the_start_that_took_it_last():
    starts = [
        {
            "from_step": done,
            "config": {"optimizer": {"learning_rate": rate}, "log": {"every": done}},
        }
        for done, rate in ((0, 0.1), (6, 0.1), (3, 0.2))
    ]
    written = WrittenRun(Path("run"), {}, {}, [], starts)
    assert [written.start_of(step)["from_step"] for step in (1, 3, 4, 7)] == [0, 0, 3, 3]
    check_one_start(written, 3, 7)
    with pytest.raises(CheckpointError, match=r"another optimizer.learning_rate.*--step 3"):
        check_one_start(written, 0, 7)
    check_one_start(WrittenRun(Path("run"), {}, {}, [], starts[:2]), 0, 7)


@pytest.mark.parametrize(("schedule", "changed"), [("cosine", "train.steps"), ("constant", None)])
def test_a_longer_run_has_other_rates_unless_they_are_constant(schedule, changed):
    starts = [
        {
            "from_step": done,
            "config": {"optimizer": {"schedule": schedule}, "train": {"steps": steps}},
        }
        for done, steps in ((0, 4), (3, 8))
    ]
    written = WrittenRun(Path("run"), {}, {}, [], starts)
    assert changed_setting(written, 0, 4) == changed
