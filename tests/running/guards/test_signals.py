"""Signals that ask a run to end: it saves, whichever comes and whoever still reads its output."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import CHEAP_FLAGS
from jax.sharding import Mesh

from spmdtrain.processes import closed_outputs, pulse, signals
from spmdtrain.running.guards.interrupt import COMMANDS, WARNINGS, Interrupt

ROOT = Path(__file__).parents[3]
MESH = Mesh(np.array([0]), ("data",))
ENDLESS = """
[model]
layers = 1
embed = 8
heads = 1
vocab = 64
[data]
corpus = "synthetic"
[train]
steps = 100000000
global_batch = 8
sequence_length = 8
[checkpoint]
every = 100000000
[mesh]
data = -1
"""


def disposed(number: int, handler):
    """Sets what becomes of a signal, and returns what puts it back."""
    before = signal.signal(number, handler)
    return lambda: signal.signal(number, before)


@pytest.mark.parametrize("number", [*COMMANDS, *WARNINGS])
def test_a_signal_asks_the_loop_to_end_and_is_given_back(number):
    put_back = disposed(number, signal.SIG_DFL)
    try:
        for around in (contextlib.nullcontext(), signals.heard()):  # in Python, and in a command
            with around:
                before = signal.getsignal(number)
                with Interrupt(MESH) as interrupt:
                    assert interrupt.agreed() is None
                    signal.raise_signal(number)
                    assert interrupt.agreed() == "preempted"
                assert signal.getsignal(number) == before
    finally:
        put_back()


@pytest.mark.parametrize("second", COMMANDS)
def test_only_the_second_command_ends_the_process_at_once(second, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with Interrupt(MESH) as interrupt:
        for number in (*WARNINGS, *WARNINGS, signal.SIGTERM, *WARNINGS):
            signal.raise_signal(number)
        assert interrupt.requested and left == []
        signal.raise_signal(second)
    assert left == [128 + second]


def test_what_a_scheduler_sends_to_a_launcher_and_its_run_is_one_request(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(signals, "_is_launched", True)
    with Interrupt(MESH) as interrupt:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert interrupt.requested and left == []
        monkeypatch.setattr(signals, "HANDED_ON_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
    assert left == [128 + signal.SIGTERM]


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_that_somebody_has_taken_or_ignores_is_left_to_them(number):
    heard = []
    for handler in (signal.SIG_IGN, lambda *_: heard.append(number)):
        put_back = disposed(number, handler)
        try:
            with Interrupt(MESH) as interrupt:
                signal.raise_signal(number)
                assert not interrupt.requested
        finally:
            put_back()
    assert heard == [number]


def test_a_launcher_still_gets_the_stacks_with_sigusr1(monkeypatch):
    monkeypatch.setattr(pulse, "_pipe", 1)
    with Interrupt(MESH):
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_an_output_is_closed_when_its_reader_is_gone():
    reader, pipe = os.pipe()
    master, terminal = pty.openpty()
    file = os.open(os.devnull, os.O_WRONLY)
    outputs = {"pipe": pipe, "terminal": terminal, "file": file}
    try:
        assert not any(map(closed_outputs._is_closed, outputs.values()))
        os.close(reader)
        os.close(master)
        closed = [name for name, number in outputs.items() if closed_outputs._is_closed(number)]
        assert closed == ["pipe", "terminal"]
    finally:
        for number in outputs.values():
            os.close(number)


def on_a_terminal(directory: Path, *prefix: str) -> tuple[subprocess.Popen, int]:
    """An endless run with a terminal of its own, and the other end of that."""
    directory.mkdir()
    (directory / "tiny.toml").write_text(ENDLESS)
    master, terminal = pty.openpty()
    take = "import fcntl, os, signal, sys, termios; os.setsid(); "
    take += "fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    take += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # the tests may run under nohup
    take += "os.execvp(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "spmdtrain.cli", "train", "tiny.toml", "--run", "run"]
    program = subprocess.Popen(
        [sys.executable, "-c", take, *prefix, *command],
        cwd=directory,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": CHEAP_FLAGS},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    os.set_blocking(master, False)
    return program, master


def drain(master: int) -> None:
    try:
        while os.read(master, 1 << 16):
            pass
    except BlockingIOError:
        pass


def steps(directory: Path) -> int:
    path = directory / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def await_steps(program: subprocess.Popen, directory: Path, count: int, masters=()) -> None:
    deadline = time.monotonic() + 180
    while steps(directory) < count:
        for master in masters:
            drain(master)
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_a_run_whose_terminal_is_closed_saves_and_ends_and_under_nohup_it_outlives_it(tmp_path):
    """Two runs at once, which start as fast as one."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    ignoring += "os.execvp(sys.argv[1], sys.argv[1:])"
    here, under_nohup = tmp_path / "here", tmp_path / "nohup"
    program, master = on_a_terminal(here)
    other, its_master = on_a_terminal(under_nohup, sys.executable, "-c", ignoring)
    try:
        for each, directory in ((program, here), (other, under_nohup)):
            await_steps(each, directory, 3, [master, its_master])
        os.close(master)
        os.close(its_master)
        assert program.wait(30) == 3
        await_steps(other, under_nohup, steps(under_nohup) + 20)
        other.send_signal(signal.SIGUSR1)
        assert other.wait(30) == 3
    finally:
        program.kill()
        other.kill()
    events = map(json.loads, (here / "run" / "events.jsonl").read_text().splitlines())
    *_, last, ended = events
    assert last["event"] == "preempted"
    assert (ended["event"], ended["exit_code"]) == ("ended", 3)
    assert (here / "run" / "checkpoints" / str(last["step"])).is_dir()
