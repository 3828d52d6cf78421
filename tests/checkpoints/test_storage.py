"""A disk that is full or cannot be written, and a run directory that is taken: one line, and
nothing is lost.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from helpers import tiny

from spmdtrain.checkpoints import store
from spmdtrain.checkpoints.intervals import plan_checkpoints
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config import StorageError, to_toml
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.running import loop
from spmdtrain.running.saves import SaveInterval
from spmdtrain.running.start import directory as module
from spmdtrain.running.start.directory import only_run

SETTINGS = (
    "train.steps=12",
    "checkpoint.every=1",
    "checkpoint.keep=100",
    "train.global_batch=2",
    "model.layers=1",
)
TRAIN = f"{sys.executable} -m spmdtrain.cli train run.toml --run disk/run --simulate-devices 1"
# In a mount namespace of its own: a small disk fills up, gets room, and cannot be written at last.
FILL = f"""
mount -t tmpfs -o size=1500k tmpfs disk || exit 99
{TRAIN} > /dev/null; echo $?
ls disk/run/checkpoints
grep -vE '"(ended|saving)"' disk/run/events.jsonl | tail -1
mount -o remount,size=64m disk
{TRAIN}; echo $?
mount -o remount,ro disk
{TRAIN} --set train.steps=14 > /dev/null; echo $?
"""


def namespaces() -> bool:
    """Whether this user may mount in a namespace of its own."""
    with_mount = ["unshare", "-rm", "bash", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(with_mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not namespaces(), reason="needs to mount a small disk")
def test_a_full_disk_costs_the_steps_since_the_last_save(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.toml").write_text(to_toml(tiny(*SETTINGS)))
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(loop.__file__).parents[2])])
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", FILL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    full, *kept_and_event = done.stdout.splitlines()
    assert full == "10", done
    at = next(number for number, line in enumerate(kept_and_event) if line.startswith("{"))
    kept = sorted(int(name) for name in kept_and_event[:at])  # and nothing unfinished
    last = json.loads(kept_and_event[at])
    assert 1 <= len(kept) < 12
    assert last["event"] == "saved"
    assert last["step"] in kept[-2:]  # the newest may not be said yet
    later = "\n".join(kept_and_event[at + 1 :])
    assert f"resumed disk/run at step {kept[-1]}\n" in later and "\n0\n10" in later
    refusals = done.stderr.splitlines()
    assert len(refusals) == 2 and all(line.startswith("spmdtrain: cannot ") for line in refusals), (
        done.stderr
    )


@pytest.mark.parametrize("after", [0.0, 0.05, 0.15])
def test_nothing_of_a_save_that_failed_stays_whenever_its_last_write_comes(
    tmp_path, monkeypatch, after
):
    monkeypatch.setattr(store, "SETTLE_SECONDS", 0.2)
    checkpoints = store.Store(tmp_path, Retention(CheckpointConfig()))
    late = tmp_path / "checkpoints" / f"5{store.UNFINISHED}" / "params" / "d"
    writes = [threading.Timer(after * times, late.mkdir, [0o755, True, True]) for times in (1, 2)]

    def fails():
        late.mkdir(parents=True)
        for write in writes:
            write.start()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._manager, "close", fails)
    with pytest.raises(StorageError, match="No space left"):
        checkpoints.close()
    for write in writes:
        write.join()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def holder(**changed) -> str:
    return json.dumps(module._this_process() | changed)


def test_who_finds_the_directory_taken_learns_by_whom(tmp_path):
    with (
        only_run(tmp_path),
        pytest.raises(StorageError, match=f"found process {os.getpid()} on "),
        only_run(tmp_path),
    ):
        pass
    with only_run(tmp_path):
        pass


@pytest.mark.parametrize(
    ("text", "free"),
    [
        (lambda: "", True),
        (lambda: "not json", True),
        (lambda: holder(start=1), True),  # a later process has got the number
        (lambda: holder(pid=2**22 + 1), True),  # higher than any
        (holder, False),
        (lambda: holder(host="elsewhere", pid=2**22 + 1), False),  # nobody knows
    ],
)
def test_without_locks_the_named_holder_counts_unless_it_is_gone(tmp_path, monkeypatch, text, free):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    (tmp_path / "lock").write_text(text())
    if free:
        with only_run(tmp_path):
            assert json.loads((tmp_path / "lock").read_text()) == module._this_process()
        return
    with pytest.raises(StorageError, match="another run is writing"), only_run(tmp_path):
        pass


def test_auto_saves_at_the_interval_that_loses_least():
    auto = SaveInterval("auto", 100, devices=8)
    due = [step for step in range(101, 115) if auto.is_due(step)]
    assert due == [110, 111, 112, 113, 114]  # until it is saved
    assert auto.saved(110, 2.0, [9.0, 0.1, 0.1, 0.3])
    every = plan_checkpoints(0.1, 2.0, 8).every
    assert auto.every == every > 1000
    assert not auto.is_due(109 + every) and auto.is_due(110 + every)
    assert not auto.saved(110 + every, 2.0, [9.0, 0.1])


def test_a_fixed_interval_stays_what_it_is():
    fixed = SaveInterval(5, 3, devices=8)
    assert not fixed.saved(5, 1e6, [1.0, 1.0]) and [
        step for step in range(4, 16) if fixed.is_due(step)
    ] == [5, 10, 15]
    assert not any(SaveInterval(0, 0, devices=8).is_due(step) for step in range(1, 10))


@pytest.mark.long
def test_a_run_on_auto_says_its_interval(tmp_path, capsys):
    settings = ("train.steps=13", "checkpoint.every=auto", "train.global_batch=2", "model.layers=1")
    loop.run(tiny(*settings), tmp_path, devices=jax.devices()[:1])
    assert "step 10/13  a save stops the run for " in capsys.readouterr().out
    saved = [
        line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"saved"' in line
    ]
    assert [json.loads(line)["step"] for line in saved] == [10, 13]
