"""The loop: metrics one step late, honest figures, evaluation of the whole split, the files it
leaves.
"""

import contextlib
import io
import json
import os
import re
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny
from orbax.checkpoint._src.serialization import replica_slices

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import identity
from spmdtrain.config import ConfigError, from_resolved
from spmdtrain.data.batches import EvalWindows
from spmdtrain.data.source import CorpusData, open_data
from spmdtrain.running import loop
from spmdtrain.running.device_batches import batches
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.report.json_lines import forget_after
from spmdtrain.running.report.metrics import OneLate, StepClock, peak_flops, step_figures
from spmdtrain.running.report.progress import Progress, duration, quantity, tell
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.saves import Saves
from spmdtrain.running.watch import Watch
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard

ONE = {"devices": jax.devices()[:1]}
SETTINGS = (
    "train.steps=6",
    "eval.every=3",
    "checkpoint.every=4",
    "log.profile=2",
    "train.global_batch=4",
    "data.validation_fraction=0.0049",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    loop.run(tiny(*SETTINGS), directory, **ONE)
    return directory


def lines(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


class Unread:
    """A metric that cannot be had before the step after it was dispatched."""

    dispatched = 0

    def __init__(self, step: int):
        self.step = step

    def __array__(self, dtype=None, copy=None):  # noqa: ARG002
        if Unread.dispatched <= self.step:
            raise AssertionError(
                f"metrics of step {self.step} were read before step {self.step + 1} was dispatched"
            )
        return np.float32(1.0)

    def is_ready(self) -> bool:
        return False


def test_metrics_are_read_only_after_the_next_step_was_dispatched(tmp_path):
    setup = shard(tiny("train.steps=8", "eval.every=0", "checkpoint.every=0"), **ONE)
    data = open_data(setup.config)[1]
    state = init_state(setup)
    Unread.dispatched = 0

    def step(state, batch):  # noqa: ARG001
        Unread.dispatched += 1
        names = ("loss", "grad_norm", "learning_rate", "tokens")
        # the last step has no next one: it is read when the loop has nothing left to dispatch
        ready = Unread.dispatched == 8
        return state, {
            name: np.float32(1) if ready else Unread(Unread.dispatched) for name in names
        }

    class NoCheckpoints:
        def save(self, *_):
            pass

        retention = None

        def completed(self):
            return []

        def wait(self):
            pass

    with Reporter(tmp_path, setup.config, 0) as reporter, batches(setup, data, 0, 0) as ahead:
        kept = identity(setup, data.fingerprint, {})
        saves = Saves(setup, lambda: kept, NoCheckpoints(), reporter, 0, 0)
        with Interrupt(setup.mesh) as interrupt:
            watch = Watch(setup, 0, lambda _: 0.0, saves, reporter, interrupt)
            outcome = loop.take_steps(watch, step, state, ahead)
    assert outcome == loop.Outcome("finished", 8)
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == list(range(1, 9))


def test_reading_on_time_would_be_noticed():
    reads = []
    late = OneLate(lambda step, *_: reads.append(step))
    late.push(1, None)
    assert reads == []
    late.push(2, None)
    assert reads == [1]
    late.flush()
    assert reads == [1, 2]


@pytest.mark.core
@pytest.mark.seconds
def test_a_run_leaves_the_files_that_were_promised(finished):
    metrics = lines(finished, "metrics.jsonl")
    steps = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    expected = {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "mfu",
    }
    expected |= {"memory_bytes", "time", "input_seconds"}
    assert set(steps[0]) == expected
    assert steps[0]["tokens"] == 4 * 16 and steps[0]["mfu"] is None
    assert [(line["step"], "eval_loss" in line) for line in metrics if "loss" not in line] == [
        (3, True),
        (6, True),
    ]
    events = [(line["event"], line["step"]) for line in lines(finished, "events.jsonl")]
    # Written in the background: when it is true.
    saves = [event for event in events if event[0] == "saved"]
    assert saves == [("saved", 4), ("saved", 6)]
    others = [event for event in events if event[0] not in ("saving", "saved")]
    assert others == [
        ("launched", 0),
        ("started", 0),
        ("compiled", 0),
        ("first_step", 1),
        ("evaluated", 3),
        ("evaluated", 6),
        ("finished", 6),
        ("ended", 6),
    ]
    compiled = json.loads((finished / "compiled.json").read_text())
    assert set(compiled) == {
        "memory",
        "collectives",
        "calls",
        "traffic",
        "compile_seconds",
        "from_cache",
        "program",
    }
    assert set(compiled["memory"]) == {
        "argument_bytes",
        "output_bytes",
        "alias_bytes",
        "temp_bytes",
    }
    saved = json.loads((finished / "config.json").read_text())
    assert from_resolved(saved).model_dump() == tiny(*SETTINGS).with_vocab(64).model_dump()
    assert saved["origin"]["eval.every"] == "--set"
    assert list((finished / "profile").rglob("*.xplane.pb")), "step 2 was traced"
    assert [path.name for path in (finished / "profile").iterdir()] == ["step2"]


def test_evaluation_is_the_mean_over_every_validation_token(finished):
    """Against a plain sum over all windows, one by one, of the weights that were saved."""
    setup = shard(tiny(*SETTINGS), **ONE)
    data = open_data(setup.config)[1]
    with contextlib.closing(Checkpoints(finished, setup, keep=None)) as checkpoints:
        state, _ = checkpoints.restore(6, setup.state)
    model = setup.model.bind(state.params)
    windows = EvalWindows(data.corpus, data.validation, 16)
    batch = windows.samples(np.arange(windows.windows))
    from spmdtrain.models.context import ForwardContext

    def token_losses(tokens, targets):
        ctx = ForwardContext(jax.numpy.broadcast_to(jax.numpy.arange(16), tokens.shape))
        hidden, table = model.head(model.blocks(model.embed(tokens, ctx), ctx)[0], ctx)
        log_probability = jax.nn.log_softmax(hidden @ table.T)
        return -jax.numpy.take_along_axis(log_probability, targets[..., None], -1)[..., 0]

    losses = np.asarray(jax.jit(token_losses)(batch["tokens"], batch["targets"]))
    assert batch["mask"].sum() == data.validation.size - 1
    assert len(losses) % 4, "the last batch must need padding"
    want = float((losses * batch["mask"]).sum() / batch["mask"].sum())
    got = [line["eval_loss"] for line in lines(finished, "metrics.jsonl") if "eval_loss" in line][
        -1
    ]
    assert got == pytest.approx(want, rel=1e-5)


def test_evaluation_without_validation_data_is_refused():
    with pytest.raises(ConfigError, match="data.validation_fraction=0"):
        open_data(tiny("eval.every=3", "data.validation_fraction=0"))


def test_figures_of_a_step():
    """Speed and MFU are of all tokens of the step, the 600 without a loss included."""
    values = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 400}
    figures = step_figures(values, 0.5, processed=1000, flops_per_token=1e9, devices=2, peak=4e12)
    assert figures["tokens"] == 400 and figures["tokens_per_second"] == 2000
    assert figures["mfu"] == pytest.approx(1e9 * 2000 / (2 * 4e12))
    assert step_figures(values, 0.5, 1000, 1e9, 2, None)["mfu"] is None
    assert peak_flops("cpu") is None and peak_flops("NVIDIA H200") == 989.4e12


def test_a_side_loss_is_reported_where_there_is_one():
    metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens": 1}
    assert "side_loss" not in step_figures(metrics, 1.0, 1, None, 1, None)
    side = metrics | {"side_loss": np.float32(0.5)}
    assert step_figures(side, 1.0, 1, None, 1, None)["side_loss"] == 0.5


@pytest.mark.parametrize("policy", ["abort", "skip"])
@pytest.mark.seconds
def test_a_step_without_a_token_with_a_loss_has_no_loss(tmp_path, monkeypatch, capsys, policy):
    """The whole batches of the steps 5 and 6 are masked, and half of that of step 4.

    Whoever judges spikes does not take the 0 of nothing for the loss of a good step.
    """
    train_samples = CorpusData.train_samples

    def with_masks(self, config):
        samples = train_samples(self, config)

        def masked(indices):
            batch = samples(indices)
            step = np.asarray(indices) // 4 + 1
            batch["mask"][(step == 5) | (step == 6)] = 0
            batch["mask"][step == 4, :8] = 0
            return batch

        return masked

    monkeypatch.setattr(CorpusData, "train_samples", with_masks)
    settings = ("train.steps=8", "train.global_batch=4", f"guard.policy={policy}", "log.every=1")
    spikes = () if policy == "abort" else ("guard.window=4", "guard.sigmas=100")
    loop.run(tiny(*settings, *spikes, "checkpoint.every=0"), tmp_path, **ONE)
    steps = lines(tmp_path, "metrics.jsonl")
    assert [line["tokens"] for line in steps] == [64, 64, 64, 32, 0, 0, 64, 64]
    assert [line["step"] for line in steps if "loss" not in line] == [5, 6]
    for line in steps:
        assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
    assert capsys.readouterr().out.count("  no token with a loss  ") == 2
    if spikes:
        assert steps[4]["loss_limit"] == steps[5]["loss_limit"] == steps[6]["loss_limit"]
        assert not any(line["skipped"] for line in steps)


def test_a_run_goes_on_where_nobody_listens(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)
    try:
        with open(1, "w", closefd=False) as closed:
            monkeypatch.setattr("sys.stdout", closed)
            tell("to nobody")
            tell("again")
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_the_step_clock_leaves_out_pauses():
    now = iter([0.0, 1.0, 1.0, 6.0, 8.0])
    clock = StepClock(lambda: next(now))
    assert clock.tick() == 1.0
    with clock.pause():  # from 1 to 6
        pass
    assert clock.tick() == 2.0


class Metric:
    """Ready once the clock has passed `done`."""

    def __init__(self, clock, done: float):
        self.clock, self.done = clock, done

    def is_ready(self) -> bool:
        return self.clock.now >= self.done

    def read(self) -> None:
        self.clock.now = max(self.clock.now, self.done)


@pytest.mark.parametrize(
    "waits", [True, False], ids=["dispatch takes the step", "dispatch returns at once"]
)
def test_every_step_has_its_own_time_where_the_loop_flushes(waits):
    """Steps of one second, flushed after the third and the last."""

    class clock:
        now = 0.0

    ticks, ready = StepClock(lambda: clock.now), 0.0
    seconds = []

    def report(_, metric, ended):
        metric.read()
        seconds.append(ticks.tick(ended))

    late = OneLate(report, lambda: clock.now)
    for step in range(1, 6):
        late.before_dispatch()
        ready = max(ready, clock.now) + 1
        if waits:
            clock.now = ready
        late.push(step, Metric(clock, ready))
        if step in (3, 5):
            late.flush()
    assert seconds == [1.0] * 5


@pytest.mark.core
@pytest.mark.seconds
def test_saved_is_said_when_it_is_true(tmp_path, monkeypatch):
    """At the moment of each event the checkpoint can be restored, and the newest one is the newest
    that was said.
    """
    seen = []
    event = Reporter.event

    def spy(self, name, step, **values):
        if name == "saved":
            seen.append((step, (tmp_path / "checkpoints" / str(step) / "meta").is_dir()))
        event(self, name, step, **values)

    monkeypatch.setattr(Reporter, "event", spy)
    loop.run(tiny("train.steps=7", "checkpoint.every=2"), tmp_path, **ONE)
    assert seen == [(2, True), (4, True), (6, True), (7, True)]


@pytest.mark.core
@pytest.mark.seconds
def test_a_step_after_a_save_can_be_profiled_on_several_devices(tmp_path):
    settings = (
        "mesh.data=2",
        "train.steps=4",
        "checkpoint.every=2",
        "log.profile=1,3,4",
        "eval.every=2",
    )
    loop.run(tiny(*settings), tmp_path, devices=jax.devices()[:2])
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step1",
        "step3",
        "step4",
    ]


@pytest.mark.seconds
def test_the_time_in_which_a_trace_is_written_belongs_to_no_step(tmp_path, monkeypatch):
    pause = 3.0  # longer than the first step, which compiles nothing

    @contextlib.contextmanager
    def slow_trace(folder):
        folder.mkdir(parents=True)
        yield
        time.sleep(pause)

    monkeypatch.setattr(jax.profiler, "trace", slow_trace)
    loop.run(tiny("train.steps=4", "log.profile=2"), tmp_path, **ONE)
    rows = lines(tmp_path, "metrics.jsonl")
    seconds = [row["step_seconds"] for row in rows if "loss" in row]
    assert len(seconds) == 4 and max(seconds) < pause
    assert seconds[1] > 0.1 * min(seconds), "nor is the traced step one without a time"


@pytest.mark.core
@pytest.mark.seconds
def test_a_save_takes_no_memory_of_the_devices(tmp_path, monkeypatch):
    """Replicated weights are not cut into slices on the devices: what just fits while training fits
    while saving.
    """

    def held() -> int:
        arrays = [
            shard.data
            for x in jax.live_arrays()
            if not x.is_deleted()
            for shard in x.addressable_shards
        ]
        return sum({x.unsafe_buffer_pointer(): x.nbytes for x in arrays}.values())

    grown = []
    transfer = replica_slices.transfer_arrays_to_host

    def spy(arrays, *arguments, **options):
        before = held()
        copied = []
        start = type(arrays[0]).copy_to_host_async
        with monkeypatch.context() as patched:
            patched.setattr(
                type(arrays[0]),
                "copy_to_host_async",
                lambda x: (copied.append(held()), start(x))[1],
            )
            found = transfer(arrays, *arguments, **options)
        grown.append(max(copied) - before)
        return found

    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", spy)
    loop.run(tiny("mesh.data=2", "train.steps=2"), tmp_path, devices=jax.devices()[:2])
    assert grown and max(grown) == 0


def test_a_resumed_run_forgets_what_it_will_do_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    damaged = b'{"step": "x"}\n[2]\n\xff\xfe{"st'
    path.write_bytes(
        b'{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n{"step": 3}\n' + damaged
    )
    forget_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n'


def test_numbers_for_people():
    assert [quantity(n) for n in (0.5, 999, 1234, 5.6e6, 8e9, 1.5e13)] == [
        "0.5",
        "999",
        "1.23k",
        "5.6M",
        "8B",
        "15T",
    ]
    assert [duration(s) for s in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]


FIGURES = {
    "loss": 2.5,
    "learning_rate": 3e-4,
    "grad_norm": 0.512,
    "tokens_per_second": 12_345.0,
    "mfu": 0.412,
    "memory_bytes": 31_400_000_000,
    "step_seconds": 0.25,
}
COMMON = "loss 2.5000  lr 3.00e-04  norm 0.512  12.3k tokens/s"


def test_the_line_of_a_step_has_what_a_person_follows(capsys):
    progress = Progress(10, 2, 1)
    progress.update(3, FIGURES | {"step_seconds": 22.1})
    progress.update(4, FIGURES)
    progress.update(5, FIGURES | {"mfu": None, "memory_bytes": None})
    first, gpu, cpu = capsys.readouterr().out.splitlines()
    assert first == f"step 3/10  {COMMON}  mfu 41.2%  31.4 GB  22.1 s for the first step"
    assert gpu == f"step 4/10  {COMMON}  mfu 41.2%  31.4 GB  0.25 s/step  eta 0:02"
    assert cpu == f"step 5/10  {COMMON}  0.25 s/step  eta 0:01"


def test_losses_stay_on_a_terminal_too(monkeypatch):
    """Lines above the live one, as many as a log has."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with Progress(10, 0, 5) as progress:
        for step in range(1, 11):
            progress.update(step, FIGURES, due=step == 1)
    assert re.findall(r"step \d+/10(?=  loss 2.5)", terminal.getvalue()) == [
        "step 1/10",
        "step 5/10",
        "step 10/10",
    ]
