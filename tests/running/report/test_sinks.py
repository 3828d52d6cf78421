"""What W&B and TensorBoard keep of steps that are taken again: the figures of the last time."""

import contextlib
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

import spmdtrain as st
from spmdtrain.config import CheckpointError, DivergedError, StorageError
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.report.sinks import JsonLinesSink
from spmdtrain.running.report.tensorboard_sink import TensorBoardSink
from spmdtrain.running.report.wandb_sink import WandbSink

STEPS = hs.integers(1, 6)
DEED = hs.one_of(
    hs.tuples(hs.just("train"), STEPS),  # so many further steps
    hs.tuples(hs.just("back"), STEPS),  # so many are taken again, and the sink is not told
    hs.tuples(hs.just("save"), hs.just(0)),
    hs.tuples(hs.just("roll back"), hs.just(0)),  # to the last save
    hs.tuples(hs.just("killed"), hs.just(0)),
    hs.tuples(hs.just("failed"), hs.just(0)),  # the sink is closed well
)


class WandbByHand:
    """What W&B's server keeps: a line whose step is not larger than the last one is dropped."""

    kept: ClassVar[dict[str, list[tuple[int, float]]]] = {}

    def __init__(self, **settings):
        self.lines = self.kept.setdefault(settings["id"], [])
        self.summary = {}

    def log(self, figures, step):
        if not self.lines or step > self.lines[-1][0]:
            self.lines.append((step, figures["loss"]))

    def finish(self):
        pass


@pytest.mark.seconds
@settings(max_examples=60, deadline=None)
@given(hs.lists(DEED, max_size=12))
def test_weights_and_biases_keeps_the_figures_of_steps_as_they_were_taken_last(deeds):
    wandb = pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(WandbByHand, "kept", {})
        patch.setattr(wandb, "init", WandbByHand)
        patch.setattr(wandb, "Settings", dict)
        directory = Path(folder)
        at, saved, taken = 0, 0, 0
        want: dict[int, float] = {}

        def opened():
            sinks = [make(directory, st.RunConfig(), at) for make in (JsonLinesSink, WandbSink)]
            for sink in sinks:
                sink.event("started", at, {})
            return sinks

        sinks = opened()
        for deed, count in [*deeds, ("train", 1), ("save", 0)]:
            if deed == "train":
                for _ in range(count):
                    at, taken = at + 1, taken + 1
                    want[at] = float(taken)
                    for sink in sinks:
                        sink.metrics(at, {"loss": want[at]})
            elif deed == "back":
                at = max(saved, at - count)
            elif deed == "save":
                saved = at
                for sink in sinks:
                    sink.event("saved", at, {})
            else:
                if deed == "roll back":
                    for sink in sinks:
                        sink.event("rolled_back", at, {"to_step": saved})
                for sink in sinks:
                    if deed != "killed" or isinstance(sink, JsonLinesSink):
                        sink.close()
                at = saved
                sinks = opened()
            want = {step: loss for step, loss in want.items() if step <= at}
        newest = (directory / "wandb" / "id").read_text()
        assert WandbByHand.kept[newest] == [*want.items()]
        if not {"failed"} & {deed for deed, _ in deeds}:
            assert len(WandbByHand.kept) == 1, "a run that is only killed stays the same one"


@pytest.mark.parametrize("other", [None, object()], ids=["alone", "with another run"])
def test_a_run_of_wandb_that_is_closed_is_on_the_disk(tmp_path, monkeypatch, other):
    wandb = pytest.importorskip("wandb")
    ended = []
    monkeypatch.setattr(wandb, "init", WandbByHand)
    monkeypatch.setattr(wandb, "run", other)
    monkeypatch.setattr(wandb, "teardown", lambda: ended.append("its service"))
    WandbSink(tmp_path, st.RunConfig(), 0).close()
    assert ended == ([] if other else ["its service"])


def test_tensorboard_is_told_which_steps_are_taken_again(tmp_path):
    """A reader drops the points that came earlier, from the step of a START on."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    sink = TensorBoardSink(tmp_path, st.RunConfig(), 0)
    for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 102.0), (3, 103.0)]:
        sink.metrics(step, {"loss": loss})
    sink.close()
    points: dict[int, float] = {}
    for file in sorted((tmp_path / "tensorboard").iterdir(), key=lambda file: file.suffix):
        data = file.read_bytes()
        while data:  # a record: its length in 8 bytes, 4 of checksum, itself, 4 of checksum
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == SessionLog.START:
                points = {step: loss for step, loss in points.items() if step < event.step}
            for value in event.summary.value:
                assert event.step not in points
                points[event.step] = value.simple_value
    assert points == {1: 1.0, 2: 102.0, 3: 103.0}


@pytest.fixture
def room():
    """Called with a number of bytes, it lets no file of this process grow larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Closed:
    """A sink of a caller, which says that it was closed."""

    def __init__(self, directory, *_):
        self.place = directory / "closed"
        self.metrics = self.event = lambda *_: None

    def close(self):
        self.place.mkdir()


def full_when_it_closes(*_):
    """Makes a sink that notices a full disk when it writes what is left."""

    def close():
        raise StorageError("cannot write what is left")

    return SimpleNamespace(metrics=lambda *_: None, event=lambda *_: None, close=close)


def test_every_sink_is_closed_whichever_fails(tmp_path):
    sinks = [full_when_it_closes, Closed, full_when_it_closes]
    with (
        pytest.raises(StorageError, match="what is left"),
        Reporter(tmp_path, st.RunConfig(), 0, sinks),
    ):
        pass
    assert (tmp_path / "closed").is_dir()


def test_a_full_disk_is_noticed_by_tensorboard_between_events(tmp_path, room):
    """A figure waits in a buffer: the one that fills it is not the one that an event flushes."""
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(tmp_path, st.RunConfig(), 0)
    room(100)
    with pytest.raises(StorageError, match="cannot write .*tensorboard: File too large"):
        for step in range(1, 1000):
            sink.metrics(step, {"loss": 1.0})


@pytest.mark.parametrize("size", [0, 10, 150, 4096, 9000])
@pytest.mark.parametrize("sinks", [(), ("tensorboard",)], ids=["files", "tensorboard"])
def test_a_disk_that_is_full_is_a_line_and_every_sink_is_closed(tmp_path, room, sinks, size):
    """Wherever it is noticed: at once, many steps later in a buffer, or on closing."""
    if sinks:
        pytest.importorskip("tensorboardX")
    config = st.RunConfig(log={"sinks": sinks})
    last = 0
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}.*: File too large"):  # noqa: SIM117
        with Reporter(tmp_path, config, 0, [Closed]) as reporter:
            room(size)
            for last in range(1, 1000):
                reporter.step(last, loss=1.0 / last, grad_norm=0.5)
                reporter.evaluated(last, 0.5, {"eval_loss": 2.0})
    assert last <= 1 + size / 30, "each step is written when it is reported"
    assert (tmp_path / "closed").is_dir()


def test_what_ended_a_run_is_said_on_a_full_disk_too(tmp_path, room):
    with pytest.raises(DivergedError), Reporter(tmp_path, st.RunConfig(), 0) as reporter:  # noqa: PT012
        reporter.step(1, loss=1.0)
        room(0)
        with contextlib.suppress(StorageError):
            reporter.step(2, loss=1.0)
        raise DivergedError("the loss is not a number")


@pytest.mark.parametrize("name", ["id", "last_step"])
def test_what_is_kept_for_wandb_is_a_line_if_it_cannot_be_written_or_read(
    tmp_path, monkeypatch, name, room
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", WandbByHand)
    sink = WandbSink(tmp_path, st.RunConfig(), 0)
    sink.metrics(1, {"loss": 1.0})
    room(0)
    with pytest.raises(StorageError, match="cannot write .*wandb/last_step"):
        sink.event("saved", 1, {})
    for there in ("id", "last_step"):
        (tmp_path / "wandb" / there).unlink(missing_ok=True)
    with pytest.raises(StorageError, match="cannot write .*wandb/id"):
        WandbSink(tmp_path, st.RunConfig(), 0)
    room(1000)
    for content in (b"", b"0b5c\n", b"7"):
        (tmp_path / "wandb" / "id").write_bytes(content)
        WandbSink(tmp_path, st.RunConfig(), 0)
    for content in (b"\xff", b"a b", b"9" * 5000, b"../x"):
        (tmp_path / "wandb" / name).write_bytes(content[:900])
        with pytest.raises(CheckpointError, match=f"wandb/{name} has been changed"):
            WandbSink(tmp_path, st.RunConfig(), 0)
