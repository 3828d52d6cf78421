"""Signals end a command at any moment, whatever it is busy with: one line, no traceback.

The loop, which saves first, is in tests/running/guards/test_signals.py.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdtrain.cli import command, main
from spmdtrain.processes import signals

ROOT = Path(__file__).parents[2]
# Where the tests run in the background of a shell, their children begin deaf to SIGINT.
HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMMAND = HEARING + "import sys; from spmdtrain.cli import main; sys.exit(main())"
ENDS_SLOWLY = f"""
{HEARING}
import atexit, sys, time
from spmdtrain.cli import main
code = main()
atexit.register(lambda: (print("late", flush=True), time.sleep(30)))
sys.exit(code)
"""
SIGNALS = (*signals.COMMANDS, *signals.WARNINGS)
LINE: dict[int, str] = {number: f"spmdtrain: ended by {number.name}\n" for number in SIGNALS}
LINE[signal.SIGINT] = "spmdtrain: interrupted\n"
TINY = """
[model]
layers = 1
embed = 8
heads = 1
vocab = 64
[data]
corpus = "synthetic"
[train]
global_batch = 8
sequence_length = 8
"""
PREPARE = ["data", "prepare", "text.txt", "--out", "out/it", "--workers", "2"]
# XLA compiles, and waits for devices, as this counts: without Python's lock, deaf to signals.
BUSY = "import hashlib; print('busy', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
BEFORE_THE_LOOP = f"""
{HEARING}
from spmdtrain.processes import signals
with signals.heard(until_exit=True):
    {BUSY}
"""
IN_THE_LOOP = f"""
{HEARING}
from spmdtrain.processes import signals
def save(*_): pass
with signals.heard(until_exit=True):
    signal.signal(signal.SIGINT, save)
    signals.saves_first(save)
    {BUSY}
"""


def started(directory: Path, program: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.seconds
def test_a_signal_before_the_loop_is_one_line_and_its_code(tmp_path):
    """At moments from the first line on: imports, devices, the model, tracing, compiling."""
    (tmp_path / "tiny.toml").write_text(TINY)
    for moment, number in [(0.0, signal.SIGINT), (0.4, signal.SIGTERM), (1.6, signal.SIGINT)]:
        program = started(tmp_path, COMMAND, "train", "tiny.toml")
        try:
            assert program.stdout is not None
            assert "starting jax" in program.stdout.readline()
            time.sleep(moment)
            program.send_signal(number)
            _, said = program.communicate(timeout=30)
        finally:
            program.kill()
        assert (program.returncode, said) == (128 + number, LINE[number])


@pytest.mark.seconds
def test_an_interrupted_prepare_says_one_line_and_leaves_nothing(tmp_path):
    """A terminal sends the signal to the workers as well, while they start."""
    (tmp_path / "text.txt").write_text("some words " * 1_000_000)
    program = started(tmp_path, COMMAND, *PREPARE)
    try:
        deadline = time.monotonic() + 30
        while len(children(program.pid)) < 2:  # multiprocessing's tracker, and a worker
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        os.killpg(program.pid, signal.SIGINT)
        _, said = program.communicate(timeout=30)
    finally:
        program.kill()
    lines = [line for line in said.splitlines(True) if not line.startswith("0%")]
    assert (program.returncode, lines) == (130, [LINE[signal.SIGINT]])
    assert not list(tmp_path.glob("out/*"))


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.parametrize(("program", "times"), [(BEFORE_THE_LOOP, 1), (IN_THE_LOOP, 2)])
def test_code_that_is_deaf_to_signals_is_ended_all_the_same(program, times, tmp_path):
    """By the first signal, or by the second one where a loop would save."""
    busy = started(tmp_path, program)
    try:
        assert busy.stdout is not None and busy.stdout.readline() == "busy\n"
        for number in range(times):
            assert busy.poll() is None, f"{number} signals have ended it"
            busy.send_signal(signal.SIGINT)
            time.sleep(0.2)
        _, said = busy.communicate(timeout=30)
    finally:
        busy.kill()
    assert (busy.returncode, said) == (130, LINE[signal.SIGINT])


@pytest.mark.seconds
def test_a_command_that_is_over_keeps_its_code(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    program = started(tmp_path, ENDS_SLOWLY, "train", "tiny.toml", "--print-config")
    try:
        assert program.stdout is not None
        while program.stdout.readline() != "late\n":
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=20)
    finally:
        program.kill()
    assert (program.returncode, said) == (0, "")


def test_who_has_taken_the_signal_over_keeps_it():
    taken = []
    before = signal.signal(signal.SIGINT, lambda *_: taken.append(1))
    try:
        with signals.heard():
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken == [1]
    time.sleep(0.1)
    assert not any(thread.name == "signals" for thread in threading.enumerate()), (
        "the thread has ended"
    )


@pytest.fixture
def by_default():
    """Nobody has taken a signal over, whatever the tests run under."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("numpy"), OSError("cut")])
def test_whatever_becomes_of_an_interrupt_is_one_line(error, number, monkeypatch, capfd):
    """numpy's import, say, turns it into an ImportError."""

    def interrupted(_):
        signal.raise_signal(number)
        raise error  # no signal reaches this line without `cleaning_up`

    def parse(_):
        with signals.cleaning_up():
            try:
                interrupted(_)
            except KeyboardInterrupt:
                raise error from None

    before = signal.getsignal(number)
    monkeypatch.setattr(command, "_run", parse)
    assert main([]) == 128 + number
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err == LINE[number]


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_command_that_has_nothing_to_clean_up(number, monkeypatch, capfd):
    left = queue.Queue()
    monkeypatch.setattr(os, "_exit", left.put)
    with signals.heard():
        signal.raise_signal(number)
        assert left.get(timeout=20) == 128 + number
    assert capfd.readouterr().err == LINE[number]
