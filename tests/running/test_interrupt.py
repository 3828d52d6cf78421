"""SIGINT before the loop ends the program within a moment, whatever C++ is busy with."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdtrain.running.interrupt import ended_by_sigint

ROOT = Path(__file__).parents[2]
# XLA compiles without the interpreter's lock and without looking at signals, as numpy does this.
BUSY = """
import pathlib, signal, sys
import numpy as np

# Where the tests run in the background of a shell, their children begin deaf to SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

from spmdtrain.cli import main
from spmdtrain.running import loop

def compile_step(*_):
    matrix = np.random.default_rng(0).random((6000, 6000))
    pathlib.Path("busy").touch()
    np.linalg.svd(matrix)

loop.compile_step = compile_step
sys.exit(main(["train", "tiny.toml"]))
"""
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
[mesh]
data = -1
"""


@pytest.mark.long
def test_sigint_while_a_step_is_compiled_ends_the_program_at_once(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    program = subprocess.Popen([sys.executable, "-c", BUSY], cwd=tmp_path, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "busy").exists():
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        asked = time.monotonic()
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=30) == 130
        assert time.monotonic() - asked < 2
    finally:
        program.kill()


def test_who_has_taken_the_signal_over_keeps_it():
    left = []
    taken = []
    before = signal.signal(signal.SIGINT, lambda *_: taken.append(1))
    try:
        with ended_by_sigint(left.append):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken == [1] and left == []
    time.sleep(0.1)
    assert not any(thread.name == "sigint" for thread in threading.enumerate()), (
        "the thread has ended"
    )
