"""A run that was stopped, killed or moved to other devices goes on exactly where it was."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, mesh_of, tiny

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.config import CheckpointError, ConfigError, to_toml
from spmdtrain.config.errors import DamagedError, DivergedError, StorageError
from spmdtrain.config.run_files import newest_step
from spmdtrain.data import batches, source
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.models.transformer import Transformer
from spmdtrain.running import loop
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.report.json_lines import forget_after
from spmdtrain.running.report.metrics import OneLate
from spmdtrain.running.start.directory import only_run
from spmdtrain.train.shard import shard

pytestmark = pytest.mark.long

STEPS = 40
SETTINGS = (
    f"train.steps={STEPS}",
    "model.dropout=0.1",
    "data.packing=documents",
    "checkpoint.every=10",
    "checkpoint.keep=3",
    "optimizer.schedule=constant",
    "train.global_batch=8",
)
MESH = ("mesh.data=4", "mesh.tensor=2", "train.zero=1")


def run(directory: Path, *overrides: str, **options) -> loop.Outcome:
    return loop.run(
        tiny(*overrides), directory, devices=jax.devices()[: mesh_of(overrides)], **options
    )


def losses(directory: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps)), "one line per step"
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def events(directory: Path) -> list[str]:
    return [
        json.loads(line)["event"] for line in (directory / "events.jsonl").read_text().splitlines()
    ]


def saved_state(directory: Path, *overrides: str):
    setup = shard(tiny(*overrides), devices=jax.devices()[: mesh_of(overrides)])
    with contextlib.closing(Checkpoints(directory, setup, keep=None)) as checkpoints:
        return checkpoints.restore(checkpoints.newest(), setup.state)[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert run(directory, *SETTINGS, *MESH) == loop.Outcome("finished", STEPS)
    return directory


@pytest.fixture(scope="module")
def half(uninterrupted, tmp_path_factory) -> Path:
    """The same run as it stood after 20 steps."""
    directory = tmp_path_factory.mktemp("half")
    shutil.copytree(uninterrupted, directory, dirs_exist_ok=True)
    for step in (30, 40):
        shutil.rmtree(directory / "checkpoints" / str(step))
    forget_after(directory / "metrics.jsonl", 20)
    return directory


@pytest.mark.core
def test_a_signal_stops_after_the_step_in_flight_and_the_resumed_run_is_bit_identical(
    uninterrupted, tmp_path, monkeypatch
):
    consumed: list[np.ndarray] = []
    push = OneLate.push

    def stop_at_20(self, step, metrics):
        if step == 20 and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            signal.raise_signal(signal.SIGTERM)
        push(self, step, metrics)

    class Spy(batches.TrainStream):
        def samples(self, indices):
            consumed.append(np.array(indices))
            return super().samples(indices)

    monkeypatch.setattr(source, "TrainStream", Spy)
    with monkeypatch.context() as patched:
        patched.setattr(OneLate, "push", stop_at_20)
        assert run(tmp_path, *SETTINGS, *MESH) == loop.Outcome("preempted", 20)
    first_half = {int(i) for ids in consumed for i in ids}
    consumed.clear()
    assert run(tmp_path, *SETTINGS, *MESH) == loop.Outcome("finished", STEPS)
    assert losses(tmp_path) == losses(uninterrupted)
    assert_same_bits(
        saved_state(tmp_path, *SETTINGS, *MESH), saved_state(uninterrupted, *SETTINGS, *MESH)
    )
    assert set(range(20 * 8)) <= first_half
    assert {int(i) for ids in consumed for i in ids} >= set(range(20 * 8, STEPS * 8))
    assert min(int(ids.min()) for ids in consumed) == 20 * 8, "no sample is seen twice"
    assert [each for each in events(tmp_path) if each != "saving"] == [
        *("launched", "started", "compiled", "first_step", "saved", "saved", "preempted", "ended"),
        *("launched", "resumed", "compiled", "first_step", "saved", "saved", "finished", "ended"),
    ]


def command(directory: Path, config: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "spmdtrain.cli",
        "train",
        str(config),
        "--run",
        str(directory),
        *more,
    ]


def wait_for_step(
    process: subprocess.Popen, directory: Path, step: int, seconds: float = 120
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, IndexError):
            if (
                json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"]
                >= step
            ):
                return
        time.sleep(0.02)
    raise AssertionError(f"no step {step}: {process.communicate(timeout=10)}")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(to_toml(tiny(*SETTINGS, *MESH)))
    return path


def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(
    uninterrupted, config_file, tmp_path
):
    """Through the command line: killed without warning, run again, and nothing shows but one
    event.
    """
    process = subprocess.Popen(
        command(tmp_path, config_file, "--simulate-devices", "8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for_step(process, tmp_path, 23)
    process.kill()
    process.wait()
    assert run(tmp_path, *SETTINGS, *MESH) == loop.Outcome("finished", STEPS)
    assert losses(tmp_path) == losses(uninterrupted)
    assert_same_bits(
        saved_state(tmp_path, *SETTINGS, *MESH), saved_state(uninterrupted, *SETTINGS, *MESH)
    )
    assert events(tmp_path).count("resumed") == 1


@pytest.mark.parametrize(
    "mesh",
    [
        *(("mesh.data=2", "mesh.tensor=4"), ("mesh.data=8",), ()),
        ("mesh.fsdp=4", "mesh.context=2"),
        ("mesh.data=2", "train.scan_layers=false"),
    ],
    ids=lambda mesh: " ".join(mesh) or "one device",
)
def test_a_run_goes_on_on_another_mesh_or_with_its_layers_written_out(
    uninterrupted, half, tmp_path, mesh
):
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    assert run(tmp_path, *SETTINGS, *mesh).status == "finished"
    got, want = losses(tmp_path), losses(uninterrupted)
    assert got.keys() == want.keys()
    assert max(abs(got[step] - want[step]) / want[step] for step in got) <= 1e-5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_two_processes_train_as_one_and_stop_together(uninterrupted, half, config_file, tmp_path):
    """Resumed from one process on two of four devices each; then a SIGTERM that only one of them
    gets. Meanwhile process 0 exports each checkpoint by itself.
    """
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    port = free_port()
    settings = ("mesh.data=4", "train.steps=4000", "checkpoint.export=1")
    more = ("--simulate-devices", "4", *(word for each in settings for word in ("--set", each)))
    flags = ("--coordinator", f"localhost:{port}", "--processes", "2")
    processes = [
        subprocess.Popen(
            command(tmp_path, config_file, *more, *flags, "--process", str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        wait_for_step(processes[0], tmp_path, STEPS)
        processes[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [3, 3], said
    got, want = losses(tmp_path), losses(uninterrupted)
    assert max(abs(got[step] - want[step]) / want[step] for step in want) <= 1e-5
    happened = [event for event in events(tmp_path) if event != "exported"]
    assert happened[-3:] == ["saved", "preempted", "ended"] and happened.count("resumed") == 1
    assert "step" in said[0] and "step" not in said[1], "process 0 speaks for all"
    exported = sorted(int(path.name) for path in (tmp_path / "exports").iterdir())
    assert len(exported) > 1 and exported[-1] == newest_step(tmp_path)
    export_run(tmp_path, tmp_path / "after")
    got, want = map(open_tensors, (tmp_path / "exports" / str(exported[-1]), tmp_path / "after"))
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name].map(), want[name].map()) for name in want)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for number in range(6):
        texts = [f"file {number}, row {row}: {'ab' * (row % 9)}" for row in range(60)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(lines)
    return folder


def test_a_stream_that_two_processes_read_goes_on_in_one(documents, tmp_path):
    """Both are killed; the samples that follow are those of a run that nothing has stopped."""
    settings = (
        *SETTINGS,
        "model.vocab=256",
        "data.corpus=jsonl",
        "data.validation_fraction=0",
        f"data.path={documents}/*.jsonl",
        "data.shuffle_buffer=32",
        "checkpoint.every=10",
        "mesh.data=2",
    )
    config = tmp_path / "run.toml"
    config.write_text(to_toml(tiny(*settings, "train.steps=4000")))
    flags = ("--simulate-devices", "1", "--coordinator", f"localhost:{free_port()}")
    processes = [
        subprocess.Popen(
            command(tmp_path / "cut", config, *flags, "--processes", "2", "--process", str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        wait_for_step(processes[0], tmp_path / "cut", 20)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    steps = max(losses(tmp_path / "cut")) + 10
    more = f"train.steps={steps}"
    assert run(tmp_path / "cut", *settings, more) == loop.Outcome("finished", steps)
    assert run(tmp_path / "whole", *settings, more) == loop.Outcome("finished", steps)
    got, want = losses(tmp_path / "cut"), losses(tmp_path / "whole")
    assert got.keys() == want.keys()
    assert max(abs(got[step] - want[step]) / want[step] for step in got) <= 1e-5


def test_a_finished_run_says_so_and_more_steps_go_on(uninterrupted, tmp_path, capsys):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    assert run(tmp_path, *SETTINGS, *MESH) == loop.Outcome("nothing to do", STEPS)
    assert "--set train.steps=80" in capsys.readouterr().out
    assert run(tmp_path, *SETTINGS, *MESH, "train.steps=41") == loop.Outcome("finished", 41)


def test_fresh_sets_the_old_run_aside(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted, directory)
    assert run(directory, *SETTINGS, *MESH, "train.steps=2", fresh=True) == loop.Outcome(
        "finished", 2
    )
    assert max(losses(tmp_path / "run.1")) == STEPS


def test_only_the_newest_checkpoints_are_kept(uninterrupted):
    assert sorted(int(path.name) for path in (uninterrupted / "checkpoints").iterdir()) == [
        20,
        30,
        40,
    ]


def test_weights_alone_start_another_run(uninterrupted, tmp_path):
    """Other optimizer, other mesh, step 0: but the loss begins where the other run ended."""
    other = (
        "mesh.fsdp=2",
        "optimizer.name=sgd",
        "optimizer.learning_rate=1e-5",
        f"train.init_from={uninterrupted}",
    )
    assert run(tmp_path, *SETTINGS, *other, "train.steps=3").status == "finished"
    assert losses(tmp_path)[1] < losses(uninterrupted)[1] - 0.3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("model.embed=64", "does not fit: blocks.*asked model.embed=64.*found model.embed=32"),
        ("train.seed=1", "train.seed"),
        ("train.sequence_length=8", "sequence_length"),
        (
            "optimizer.name=sgd",
            "asked .*optimizer.name=sgd; found .*optimizer.name=adamw in the run",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(uninterrupted, tmp_path, change, word):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    before = os.listdir(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=word):
        run(tmp_path, *SETTINGS, *MESH, change, "train.steps=80", "model.max_length=16")
    assert os.listdir(tmp_path / "checkpoints") == before


ONE_DEVICE = (
    "optimizer.schedule=constant",
    "train.global_batch=8",
    "checkpoint.every=2",
    "train.steps=4",
)


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Path]:
    """Short runs on one device, by the setting that tells them apart."""
    found = {}
    for change in ("model.bias=true", "model.tied=false", "optimizer.name=sgd"):
        found[change] = tmp_path_factory.mktemp("family")
        run(found[change], *ONE_DEVICE, change)
    return found


PIPELINE = ("mesh.pipeline=2", "train.microbatch=4")


@pytest.mark.parametrize("mesh", [(), PIPELINE], ids=["the same layout", "another layout"])
@pytest.mark.parametrize(
    ("trained", "change", "name"),
    [
        ("model.bias=true", "model.bias=false", "blocks.layer.attention.out_bias"),
        ("model.bias=true", "model.tied=false", "unembed_ve"),
        ("model.tied=false", "model.tied=true", "unembed_ve"),
    ],
)
def test_a_model_with_more_or_fewer_parameters_is_refused_by_name(
    families, tmp_path, mesh, trained, change, name
):
    """On resume and as weights to start from: nothing that was trained is dropped in silence."""
    shutil.copytree(families[trained], tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"does not fit: .*{name}"):
        run(tmp_path / "run", *ONE_DEVICE, *mesh, change, "train.steps=6")
    with pytest.raises(CheckpointError, match=f"does not fit: .*{name}"):
        run(tmp_path / "other", *ONE_DEVICE, *mesh, change, f"train.init_from={families[trained]}")


@pytest.mark.parametrize("mesh", [(), PIPELINE], ids=["the same layout", "another layout"])
@pytest.mark.parametrize(
    ("trained", "change"),
    [
        ("model.bias=true", "optimizer.weight_decay=0"),
        ("optimizer.name=sgd", "optimizer.weight_decay=0"),
        ("optimizer.name=sgd", "optimizer.momentum=0"),
    ],
)
def test_an_optimizers_values_may_change(families, tmp_path, mesh, trained, change):
    """A decay or momentum of 0 keeps what the others keep: the run goes on, and is obeyed."""
    shutil.copytree(families[trained], tmp_path, dirs_exist_ok=True)
    assert run(tmp_path, *ONE_DEVICE, *mesh, trained, change, "train.steps=6").step == 6
    assert losses(tmp_path)[4] == losses(families[trained])[4]


@pytest.mark.parametrize("change", ["model.norm_epsilon=1e-3", "model.norm=rmsnorm"])
def test_a_setting_that_changes_no_shape_but_the_function_is_refused(tmp_path, capsys, change):
    settings = (*ONE_DEVICE, "model.bias=false")
    run(tmp_path / "run", *settings)
    name, now = change.split("=")
    with pytest.raises(
        CheckpointError, match=f"{name} has changed; asked .*; found .* in the checkpoint"
    ):
        run(tmp_path / "run", *settings, change, "train.steps=6")
    run(tmp_path / "other", *settings, change, f"train.init_from={tmp_path / 'run'}")
    assert f"were trained with {name}=" in capsys.readouterr().out


def test_a_run_that_was_resumed_twice_is_bit_identical(tmp_path):
    """Each time from where it stood: the position of the data is counted on, not from the last
    resume.
    """
    for name, ends in (("at once", [6]), ("in parts", [2, 4, 6])):
        for steps in ends:
            run(tmp_path / name, *ONE_DEVICE, f"train.steps={steps}")
    assert losses(tmp_path / "in parts") == losses(tmp_path / "at once")
    settings = (*ONE_DEVICE, "train.steps=6")
    assert_same_bits(*(saved_state(tmp_path / name, *settings) for name in ("in parts", "at once")))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("fresh", [False, True])
def test_a_refused_command_changes_nothing(uninterrupted, tmp_path, fresh):
    shutil.copytree(uninterrupted, tmp_path / "run")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="model.attention='cudnn' cannot run"):
        run(
            tmp_path / "run",
            *SETTINGS,
            *MESH,
            "train.steps=80",
            "model.attention=cudnn",
            fresh=fresh,
        )
    after, log, page = contents(tmp_path), "run/events.jsonl", "run/report.html"
    assert after.pop(log).startswith(before.pop(log)), "the attempt is told"
    # The page is made of the others, and tells of the attempt where the directory was opened.
    assert (after.pop(page) == before.pop(page)) == fresh
    assert after == before


def test_weights_to_start_from_are_not_set_aside(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    source = f"train.init_from={tmp_path / 'run'}"
    with pytest.raises(ConfigError, match="is the run that --fresh sets aside; try another --run"):
        run(tmp_path / "run", *SETTINGS, *MESH, source, fresh=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        run(tmp_path / "run", *SETTINGS, *MESH, f"train.init_from={tmp_path / 'none'}", fresh=True)
    assert os.listdir(tmp_path) == ["run"]


def test_two_runs_in_one_directory_are_one_too_many(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    with only_run(tmp_path):
        for fresh in (False, True):
            with pytest.raises(
                StorageError,
                match="another run is writing .*; try waiting until it ends, or another --run",
            ):
                run(tmp_path, *SETTINGS, *MESH, "train.steps=80", fresh=fresh)
    assert run(tmp_path, *SETTINGS, *MESH) == loop.Outcome("nothing to do", STEPS)


@pytest.mark.parametrize("size", [0, 100, None])
@pytest.mark.parametrize("item", ["params", "state"])
def test_a_damaged_file_of_a_checkpoint_is_one_line(uninterrupted, tmp_path, item, size):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    data = max(
        (tmp_path / "checkpoints" / "40" / item).rglob("d/*"), key=lambda path: path.stat().st_size
    )
    data.unlink() if size is None else os.truncate(data, size)
    said = (
        "checkpoints/40 is damaged: it cannot be read: [A-Z_]+: .*; "
        "try resuming the run, .* from step 30$"
    )
    with pytest.raises(DamagedError, match=said):
        saved_state(tmp_path, *SETTINGS, *MESH)


@pytest.mark.parametrize("meta", [[], {"format": 2}, {"format": 2, "leaves": {}, "layout": 3}])
def test_a_checkpoint_that_says_nothing_of_itself_is_one_line(uninterrupted, tmp_path, meta):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / "40" / "meta" / "metadata").write_text(json.dumps(meta))
    with pytest.raises(DamagedError, match="checkpoints/40 is damaged: it cannot be read"):
        saved_state(tmp_path, *SETTINGS, *MESH)


def assert_the_newest_checkpoint_is_finite(
    directory: Path, error: DivergedError, *overrides: str
) -> None:
    state = saved_state(directory, *overrides)
    named = re.search(r"; step (\d+) is the newest checkpoint", str(error))
    assert named and int(named[1]) == int(state.step)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.opt_state)))
    said = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in said if line["event"] == "saved") == int(state.step)


class InfiniteGradient(Transformer):
    """Once it is ill, finite losses, but a gradient of 0 / 0: the root of 0 in the embedding."""

    is_ill = False

    def embed(self, tokens_bt, ctx):
        x_bte = super().embed(tokens_bt, ctx)
        if not self.is_ill:
            return x_bte
        return x_bte + jnp.sqrt(jnp.maximum(x_bte - jax.lax.stop_gradient(x_bte), 0))


ILL = {
    "the loss": (("optimizer.learning_rate=1e30",), Transformer, "the loss of step [34] is"),
    "the gradient": ((), InfiniteGradient, "the gradient norm of step 3 is nan"),
    "the weights": (
        ("optimizer.weight_decay=3e38", "optimizer.learning_rate=3e3"),
        Transformer,
        "the weights or the optimizer state after step 3 are not finite",
    ),
}


@pytest.mark.parametrize("kind", ILL)
def test_whatever_is_not_finite_ends_the_run_before_it_is_saved(tmp_path, kind, monkeypatch):
    """After two good steps: exit 9 names them, and they are what the newest checkpoint holds."""
    wild, make, words = ILL[kind]
    settings = (*ONE_DEVICE, "checkpoint.every=1", "checkpoint.keep=1", "optimizer.warmup=0")
    run(tmp_path, *settings, "train.steps=2", make=make)
    monkeypatch.setattr(InfiniteGradient, "is_ill", True)
    with pytest.raises(DivergedError, match=words) as raised:
        run(tmp_path, *settings, *wild, "train.steps=6", make=make)
    assert raised.value.exit_code == 9
    assert_the_newest_checkpoint_is_finite(tmp_path, raised.value, *settings)
    assert events(tmp_path)[-2:] == ["diverged", "ended"]


def test_a_diverged_run_ends_before_it_saves(tmp_path):
    wild = (
        "optimizer.name=sgd",
        "optimizer.learning_rate=1e30",
        "train.clip=none",
        "train.steps=6",
    )
    with pytest.raises(
        DivergedError, match="the loss of step [23] is nan; step 1 is the newest checkpoint"
    ) as raised:
        run(tmp_path, *wild, "checkpoint.every=1", "checkpoint.keep=1")
    assert raised.value.exit_code == 9 and os.listdir(tmp_path / "checkpoints") == ["1"]
    assert events(tmp_path)[-2:] == ["diverged", "ended"]
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=pytest.fail)["loss"] is None
