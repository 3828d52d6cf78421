"""Each example of examples/seams, run as a person would, and whether what it exchanges has its
effect.
"""

import contextlib
import csv
import json
import os
import runpy
import shutil
import sqlite3
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, batches_of, mesh_of, tiny
from shares import rest

import spmdtrain as st
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.config import CheckpointError, ConfigError, UserError
from spmdtrain.train.state import bytes_per_device
from spmdtrain.train.step import make_losses
from spmdtrain.train.updates.learning_rates import learning_rate

pytestmark = [
    pytest.mark.long,
    rest("runs the examples; running/test_own_by_name.py and train/test_own_*.py hold each seam"),
]

SEAMS = Path(__file__).parent.parent / "examples" / "seams"
DEVICES = jax.devices()
ONE = {"devices": DEVICES[:1]}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Examples run in a folder of their own, on one device: eight would take turns on the cores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda *_: DEVICES[:1])


def names_of(example: str) -> dict:
    """What the example defines; nothing is run."""
    return runpy.run_path(str(SEAMS / f"{example}.py"))


def run_as_typed(example: str) -> None:
    """`python examples/seams/<example>.py`."""
    runpy.run_path(str(SEAMS / f"{example}.py"), run_name="__main__")


def lines(file: str) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def losses(directory: str) -> list[float]:
    return [line["loss"] for line in lines(f"{directory}/metrics.jsonl") if "loss" in line]


def restored(directory: str, setup: st.Setup):
    with contextlib.closing(Checkpoints(Path(directory), setup, keep=None)) as checkpoints:
        return jax.device_get(checkpoints.restore(checkpoints.newest(), setup.state)[0])


def step_by_hand(setup: st.Setup):
    """(state, metrics) after the first step."""
    with batches_of(setup) as ahead:
        return jax.device_get(st.make_step(setup)(st.init_state(setup), next(ahead)))


@pytest.mark.parametrize("path", sorted(SEAMS.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_run_by_a_test(path):
    assert len(path.read_text().splitlines()) < 40
    assert f'run_as_typed("{path.stem}")' in Path(__file__).read_text()


def test_a_sink_of_ones_own_has_the_losses_of_metrics_jsonl():
    run_as_typed("sink")
    text = Path("runs/csv/losses.csv").read_text().splitlines()
    rows = [(int(step), float(loss)) for step, loss in csv.reader(text)]
    written = [(line["step"], line["loss"]) for line in lines("runs/csv/metrics.jsonl")]
    assert len(rows) == 20 and rows == written


def test_a_sink_for_trackio_logs_every_figure_of_a_run(monkeypatch):
    """Of a stand-in that has the calls of trackio 0.43; the next test has the real one."""
    logged = {}
    run = SimpleNamespace(
        log=lambda figures, step: logged.update({step: figures}),
        finish=lambda: logged.update(finished=True),
    )

    def init(project, name=None, config=None, resume="never"):
        logged["run"] = project, name, config["train"]["steps"], resume
        return run

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    run_as_typed("trackio_sink")
    assert logged.pop("run") == ("spmdtrain", "trackio", 20, "allow")
    assert logged.pop("finished") and list(logged) == list(range(1, 21))
    assert [figures["loss"] for figures in logged.values()] == losses("runs/trackio")


def test_trackio_itself_keeps_every_step(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    run_as_typed("trackio_sink")
    (file,) = tmp_path.glob("spmdtrain*.db")
    with contextlib.closing(sqlite3.connect(file)) as kept:
        assert kept.execute("select min(step), max(step) from metrics").fetchone() == (1, 20)


def test_a_hook_stops_the_run_saved_and_it_goes_on(capsys):
    run_as_typed("hook")
    found = losses("runs/good_enough")
    enough = names_of("hook")["ENOUGH"]
    below = [step for step, loss in enumerate(found, 1) if loss < enough]
    assert below[0] < 100, "the hook had nothing to stop"
    assert len(found) == below[0] + 1, "the step in flight is the last"
    assert [each["event"] for each in lines("runs/good_enough/events.jsonl")][-2:] == [
        "stopped",
        "ended",
    ]
    printed = capsys.readouterr().out
    assert f"step {len(found)} is safe on disk" in printed
    assert f"stopped after {len(found)} of 500 steps" in printed
    assert Path(f"runs/good_enough/checkpoints/{len(found)}").is_dir()


def test_hooks_see_steps_evaluations_and_saves_in_order():
    seen = []

    def watch(event, step, figures):
        seen.append((event, step, sorted(figures)[:1]))

    config = tiny("train.steps=4", "eval.every=2", "eval.batches=1", "checkpoint.every=0")
    assert st.run(config, "run", hooks=[watch], **ONE).status == "finished"
    steps = [("step", step, ["grad_norm"]) for step in (1, 2, 3, 4)]
    evaluated = [("evaluated", step, ["eval_loss"]) for step in (2, 4)]
    assert seen == [*steps[:2], evaluated[0], *steps[2:], evaluated[1], ("saved", 4, ["bytes"])]


def test_tensorboard_has_every_figure_of_a_run_that_was_resumed(monkeypatch):
    pytest.importorskip("tensorboardX")
    from tensorboardX import event_file_writer
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  the format read below

    # Both files are made in one second, which is all of the time that tensorboardX puts in a name.
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: 1_700_000_000.0))
    for steps in (2, 4):
        st.run(tiny(f"train.steps={steps}", "log.sinks=tensorboard"), "run", **ONE)
    points = {}
    for file in sorted(Path("run/tensorboard").iterdir()):
        data = file.read_bytes()
        while data:  # a record: its length in 8 bytes, 4 of checksum, itself, 4 of checksum
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                points[value.tag, event.step] = value.simple_value
    want = losses("run")
    assert [points["loss", step] for step in (1, 2, 3, 4)] == pytest.approx(want, rel=1e-6)
    assert ("learning_rate", 4) in points and ("mfu", 4) not in points


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hooks": [lambda *_: 3]}, "returned 3 after step of step 1; try True"),
        ({"hooks": print}, "hooks=<built-in function print> is not a list of callables"),
        ({"sinks": ["tensorboard"]}, r"sinks=\['tensorboard'\] is not a list of callables"),
        ({"sinks": [lambda *_: object()]}, "has no metrics and no event and no close"),
    ],
    ids=["hook gives 3", "hooks no list", "sink is a name", "sink without methods"],
)
def test_what_is_no_sink_and_no_hook_costs_one_line(given, said):
    with pytest.raises(ConfigError, match=said):
        st.run(tiny("train.steps=3"), "run", **given, **ONE)


def test_a_loss_of_ones_own_is_trained_on_and_shows_its_figures():
    run_as_typed("loss")
    figures = [line for line in lines("runs/focal/metrics.jsonl") if "loss" in line]
    assert len(figures) == 20
    assert figures[-1]["accuracy"] > figures[0]["accuracy"]
    # At the beginning all 64 ids are as likely: (1 - 1/64)^2 x ln 64.
    assert figures[0]["loss"] == pytest.approx((1 - 1 / 64) ** 2 * np.log(64), rel=0.02)


def test_side_losses_of_ones_own_are_trained_on_and_shown_by_name():
    run_as_typed("side_losses")
    shown = [line for line in lines("runs/calm/metrics.jsonl") if "loss" in line]
    assert shown[-1]["loss"] < shown[0]["loss"]
    given = names_of("side_losses")
    st.run(given["CONFIG"], "plain")  # without them
    setup = st.shard(st.open_data(given["CONFIG"])[0], given["CalmTransformer"], **ONE)
    calm, plain = (size_of(setup, run) for run in ("runs/calm", "plain"))
    assert calm < 0.8 * plain, "they are part of what is minimised"


def size_of(setup: st.Setup, directory: str) -> float:
    """The side loss `size` of a run's last weights on the first batch."""
    with batches_of(setup) as ahead:
        sums = jax.jit(make_losses(setup))(st.weights(directory), next(ahead))
    return float(sums["size"] / sums["tokens"])


def test_an_optimizer_of_ones_own_is_used_by_groups_and_frozen_weights_keep_nothing():
    run_as_typed("optimizer")
    seam = names_of("optimizer")
    setup = st.shard(seam["CONFIG"].with_vocab(64), optimizer=seam["groups"])
    fresh = jax.device_get(st.init_state(setup))
    trained = restored("runs/groups", setup)
    frozen = "tokens.table_ve"
    assert np.array_equal(fresh.params[frozen], trained.params[frozen])
    assert frozen not in trained.opt_state
    # Lion moves each weight by the learning rate, whatever its gradient, and decays it.
    state, batch = step_by_hand(setup)
    path = "blocks.layer.mlp.up_ef"
    moved = np.abs(state.params[path] - fresh.params[path] * (1 - 0.1 * batch["learning_rate"]))
    np.testing.assert_allclose(moved, batch["learning_rate"], rtol=1e-3)
    scale = np.abs(state.params["norm.scale_e"] - fresh.params["norm.scale_e"])
    np.testing.assert_allclose(scale, 0.1 * batch["learning_rate"], rtol=1e-2)


def test_an_estimate_counts_the_state_of_an_optimizer_of_ones_own():
    config = tiny("mesh.data=2", "train.zero=1")

    def halves(path, parameter):  # noqa: ARG001
        return None if "mlp" in path else optax.scale_by_lion()

    found = st.estimate(config, 2, "h200", optimizer=halves).memory.optimizer
    state = st.shard(config, devices=DEVICES[:2], optimizer=halves).state
    assert found == bytes_per_device((state.opt_state, state.step))
    assert found < st.estimate(config, 2, "h200").memory.optimizer / 2


def test_a_learning_rate_of_ones_own_is_what_the_run_reports():
    run_as_typed("learning_rate")
    rates = [line["learning_rate"] for line in lines("runs/wsd/metrics.jsonl")]
    want = [3e-3 * min(1, (step + 1) / 5, (20 - step) / 10) for step in range(20)]
    assert rates == pytest.approx(want, rel=1e-6)


SPLIT = ("mesh.data=2", "train.zero=1")
STAGES = ("mesh.pipeline=2", "train.microbatch=4")


def trained_in(directory: str, steps: int, *settings: str, **seam):
    config = tiny(f"train.steps={steps}", "model.dropout=0.1", *settings)
    devices = DEVICES[: mesh_of(settings)]
    st.run(config, directory, devices=devices, **seam)
    setup = st.shard(config, devices=devices, **{k: v for k, v in seam.items() if k != "data"})
    return restored(directory, setup)


@pytest.mark.parametrize(
    "seam",
    [
        {"optimizer": "groups", "learning_rate": "warm_stay_fall"},
        {"optimizer": optax.identity()},  # it keeps no state at all
    ],
    ids=["groups", "no state"],
)
def test_a_run_goes_on_bit_by_bit_with_the_same_seam_and_on_another_mesh(seam):
    seam = {
        name: names_of(name)[given] if isinstance(given, str) else given
        for name, given in seam.items()
    }
    whole = trained_in("whole", 4, *SPLIT, **seam)
    trained_in("halves", 2, *SPLIT, **seam)
    shutil.copytree("halves", "moved")
    assert_same_bits(trained_in("halves", 4, *SPLIT, **seam), whole)
    assert losses("halves") == losses("whole")
    trained_in("moved", 4, *STAGES, **seam)
    assert losses("moved") == pytest.approx(losses("whole"), rel=2e-5)


def test_an_own_rate_of_one_and_the_shipped_rules_are_the_shipped_optimizer_bit_by_bit():
    config = tiny("train.steps=3")
    same = {
        "optimizer": st.make_optimizer(config.optimizer),
        "learning_rate": partial(learning_rate, config.optimizer, 3),
    }
    st.run(config, "shipped", **ONE)
    st.run(config, "own", **same, **ONE)
    assert losses("own") == losses("shipped")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"optimizer": "lion"},
            "optimizer='lion' is not an optimizer; try an optax transformation",
        ),
        ({"optimizer": optax.lion(1e-3)}, "points against the gradient.*optax.scale_by_lion"),
        ({"optimizer": lambda *_: 0.1}, "optimizer= gives 0.1 for "),
        ({"optimizer": lambda *_: None}, "optimizer= freezes all 16 parameters"),
        ({"learning_rate": 0.1}, "learning_rate=0.1 is not a function of the step; try a function"),
        ({"learning_rate": lambda step: 1.0 if step < 3 else 0.0}, "jnp.where instead of if"),
        (
            {"learning_rate": lambda step: step * jnp.ones(2)},
            r"shape \(2,\), not one rate",
        ),
    ],
    ids=["a name", "with its rate", "a number", "all frozen", "rate", "if", "vector"],
)
def test_what_is_no_optimizer_and_no_schedule_costs_one_line(given, said):
    with pytest.raises(ConfigError, match=said) as refused:
        st.shard(tiny(), **ONE, **given)
    assert "\n" not in str(refused.value)


def test_data_of_ones_own_are_what_is_trained_and_evaluated_on():
    run_as_typed("data")
    seam = names_of("data")
    config, sums = seam["CONFIG"], seam["sums"]
    source = st.Source(sums, seam["held_out"], 64)
    _, data = st.open_data(config, source)
    setup = st.shard(config)
    with st.batches(setup, data, 0, 0) as ahead:
        rows = [np.asarray(next(ahead)["tokens"])[0] for _ in range(2)]
    want = np.stack([sums(config.train.seed, index)[:-1] for index in range(32)])
    assert np.array_equal(np.concatenate(rows), want)
    found = lines("runs/sums/metrics.jsonl")
    assert [line["step"] for line in found if "eval_loss" in line] == [10, 20]
    assert losses("runs/sums")[0] == pytest.approx(np.log(12), rel=0.05)


def test_evaluation_on_data_of_ones_own_is_the_mean_over_its_samples():
    """64 samples of which only 10 are there, in batches of 16: the rows beyond them count
    nothing.
    """
    seam = names_of("data")
    config = seam["CONFIG"]
    setup = st.shard(config)
    state = st.init_state(setup)

    def evaluated(samples: int) -> float:
        _, data = st.open_data(config, st.Source(seam["sums"], seam["held_out"], samples))
        return st.make_evaluate(setup, data)(state)

    rows = np.stack([seam["held_out"](config.train.seed, index) for index in range(10)])
    logits = st.make_logits(setup)(state.params, rows[:, :-1])
    log_probability = np.asarray(jax.nn.log_softmax(logits))
    want = -np.take_along_axis(log_probability, rows[:, 1:, None], -1).mean()
    assert evaluated(10) == pytest.approx(float(want), rel=1e-5)
    assert evaluated(16) != pytest.approx(float(want), rel=1e-5)


def test_samples_that_validate_need_a_function_that_gives_them():
    seam = names_of("data")
    config = seam["CONFIG"]
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})
    _, data = st.open_data(config, st.Source(seam["sums"], validation_samples=10))
    (only,) = data.eval_sets(config)
    with pytest.raises(
        ConfigError, match="data= has validation_samples, but no validation; try Source"
    ):
        only.windows.samples(np.arange(4))


def test_data_of_ones_own_go_on_bit_by_bit_and_others_are_refused():
    def count(seed, index):
        return (np.arange(17) * (index + 1) + seed) % 64

    whole = trained_in("whole", 4, *SPLIT, data=count)
    trained_in("halves", 2, *SPLIT, data=count)
    assert_same_bits(trained_in("halves", 4, *SPLIT, data=count), whole)
    assert losses("halves") == losses("whole")
    with pytest.raises(CheckpointError, match="the corpus is not the one this run was trained on"):
        trained_in("halves", 6, *SPLIT, data=lambda seed, index: count(seed, index + 1))


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        ("stdlib", (), "data='stdlib' is not a source of data; try a function"),
        (lambda *_: np.zeros(5, int), (), r"data= gives int64\[5\] for sample 0; try 17 integers"),
        (lambda *_: np.zeros(17), (), r"data= gives float64\[17\] for sample 0"),
        (lambda *_: np.arange(17) + 60, (), "id 64 in sample 0; asked model.vocab=64"),
        (lambda *_: np.arange(17) - 1, (), "id -1 in sample 0"),
        (lambda *_: np.arange(17), ("eval.every=1",), "data= has no validation"),
        (lambda *_: np.arange(17), ("model.vocab=none",), "nothing states the number of ids"),
        (lambda *_: np.arange(17), ("data.packing=documents",), "where documents start"),
    ],
    ids=["a name", "short", "floats", "beyond", "negative", "validation", "vocab", "documents"],
)
def test_what_is_no_data_costs_one_line(given, settings, said):
    with pytest.raises(UserError, match=said):
        st.run(tiny(*settings), "run", data=given, **ONE)
    assert not Path("run").exists()


def test_parts_of_ones_own_stand_in_the_shipped_block_and_text_is_made_with_them():
    run_as_typed("parts")
    seam = names_of("parts")
    found = losses("runs/squared_relu")
    assert found[-1] < found[0] - 0.3
    weights = st.weights("runs/squared_relu")
    assert {path for path in weights if ".mlp." in path} == {
        "blocks.layer.mlp.up_ef",
        "blocks.layer.mlp.down_fe",
    }
    ids = st.generate("runs/squared_relu", [1, 2, 3], 5, make=seam["model"])
    assert ids.shape == (8,)
    # Nothing says where a token is: the sum over a sequence of one token is the same everywhere.
    setup = st.shard(seam["CONFIG"].with_vocab(64), seam["model"])
    logits = np.asarray(st.make_logits(setup)(st.init_state(setup).params, [[7] * 6]))[0]
    np.testing.assert_allclose(logits, np.broadcast_to(logits[:1], logits.shape), atol=1e-5)
    rope = st.shard(seam["CONFIG"].with_vocab(64), partial(st.Transformer, mlp=seam["SquaredRelu"]))
    mixed = np.asarray(st.make_logits(rope)(st.init_state(rope).params, [[7, 8, 9, 7]]))[0]
    assert not np.allclose(mixed[0], mixed[3], atol=1e-5)


def test_own_parts_train_alike_on_every_mesh():
    parts = names_of("parts")["model"]
    for name, mesh in {"one": (), "split": ("mesh.tensor=2",), "stages": STAGES}.items():
        st.run(tiny("train.steps=3", *mesh), name, make=parts, devices=DEVICES[: mesh_of(mesh)])
    assert losses("split") == pytest.approx(losses("one"), rel=2e-5)
    assert losses("stages") == pytest.approx(losses("one"), rel=2e-5)


def test_what_is_no_part_costs_one_line():
    for parts, said in (
        ({"mlp": "relu"}, "mlp='relu' is not a part of a block; try a class"),
        ({"norm": 3}, "norm=3 is not a part of a block"),
    ):
        with pytest.raises(ConfigError, match=said):
            st.shard(tiny(), partial(st.Transformer, **parts), DEVICES[:1])

    class Wide(nnx.Module):
        """A block that gives more than it takes."""

        def __init__(self, rngs):  # noqa: ARG002
            self.scale = nnx.Param(jnp.ones(32), out_sharding=("norm",))

        def __call__(self, x_bte, ctx):  # noqa: ARG002
            return jnp.concatenate([x_bte * self.scale[...]] * 2, -1)

    class Model(st.Transformer):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.blocks = st.Stack(Wide, config.model.layers, rngs)

    with pytest.raises(
        ConfigError, match=r"a Wide turns float32\[16, 16, 32\] into float32\[16, 16, 64\]"
    ):
        st.run(tiny(), "run", make=Model, **ONE)


def records_of_wandb(file: Path) -> list:
    """The records of a run written offline: blocks of 32 KiB behind 7 bytes, as LevelDB's log has
    them.
    """
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    found, parts, at = [], [], 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no header fits
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
    return found


def points_of_wandb(name: str) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """The (step, value) of every line with `name`, in the order of sending, by the run's id."""
    points = {}
    files = sorted(Path("run/wandb").glob("offline-run-*/run-*.wandb"), key=os.path.getmtime)
    for file in files:
        records = records_of_wandb(file)
        [run] = [each.run.run_id for each in records if each.WhichOneof("record_type") == "run"]
        points.setdefault(run, [])
        for record in records:
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if name in items:
                points[run].append((int(items["_step"]), float(items[name])))
    return points, [*points]


def test_weights_and_biases_has_every_figure_offline_and_a_resumed_run_is_the_same_one(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (2, 4):
        st.run(tiny(f"train.steps={steps}", "log.sinks=wandb"), "run", **ONE)
    points, _ = points_of_wandb("loss")
    assert points == {Path("run/wandb/id").read_text(): [*enumerate(losses("run"), 1)]}
