"""Of two processes one ends before its time: each says in its own way what happened, none hangs."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny

from spmdtrain.config import to_toml
from spmdtrain.config.run_files import newest_step
from spmdtrain.data.prepare.token_writer import write_tokens
from spmdtrain.data.tokenizers.tokenizer import open_tokenizer
from spmdtrain.running import loop

pytestmark = pytest.mark.long

DATA, LOST = 5, 8
SOON = 15  # seconds in which a process ends after another did
STEPS, EVERY, BATCH = 4000, 5, 8
SMALLEST = (
    "model.layers=1", "model.embed=16", "model.heads=2", "model.vocab=256",
    "mesh.data=2", "optimizer.name=sgd", "data.shuffle=false",
    f"train.steps={STEPS}", f"checkpoint.every={EVERY}", f"train.global_batch={BATCH}",
)  # fmt: skip


@contextlib.contextmanager
def two(*command):
    """Two processes of one command, told who they are; killed at the end if still there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    told = ("--coordinator", f"localhost:{port}", "--processes", "2", "--process")
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command), *told, str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def ended(processes, first: int) -> list[tuple[int, str]]:
    """(exit code, stderr) of each process. `first` ends when it likes, the other soon after."""
    said = {first: processes[first].communicate(timeout=120)[1]}
    said[1 - first] = processes[1 - first].communicate(timeout=SOON)[1]
    return [(processes[rank].returncode, said[rank]) for rank in range(2)]


@pytest.fixture
def tokens(tmp_path) -> Path:
    text = "to be or not to be, that is the question " * 2000
    write_tokens(tmp_path / "corpus", [text], open_tokenizer("bytes"))
    return tmp_path / "corpus.bin"


def settings(tokens: Path, *more: str):
    return tiny(*SMALLEST, "data.corpus=tokens", f"data.path={tokens}", *more)


def events(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def train(tokens: Path, directory: Path) -> tuple:
    config = tokens.parent / "run.toml"
    config.write_text(to_toml(settings(tokens)))
    return "-m", "spmdtrain.cli", "train", config, "--run", directory, "--simulate-devices", "1"


def test_a_mistake_in_what_one_process_reads_is_its_line_and_the_others_news(tokens, tmp_path):
    length, step = tiny(*SMALLEST).train.sequence_length, 12
    ids = np.memmap(tokens, "<u2", mode="r+")
    ids[(BATCH * step + BATCH - 1) * length + 3] = 999  # in the last row of a batch: of process 1
    ids.flush()
    with two(*train(tokens, tmp_path / "run")) as processes:
        (code, said), (own_code, own) = ended(processes, 1)
    assert own_code == DATA, own
    assert own.startswith(f"spmdtrain: {tokens}: id 999") and own.count("\n") == 1
    assert (code, said) == (LOST, own.replace("spmdtrain: ", "spmdtrain: process 1 failed: "))


def test_after_a_kill_9_the_other_says_so_and_nothing_that_was_saved_is_lost(tokens, tmp_path):
    """Of process 0, which holds most: the run directory's lock, and what jax would depend on."""
    directory, victim = tmp_path / "run", 0
    with two(*train(tokens, directory)) as processes:
        while not (directory / "checkpoints" / str(2 * EVERY)).exists():
            assert all(process.poll() is None for process in processes), ended(processes, 0)
            time.sleep(0.02)
        processes[victim].kill()
        (code, _), (other_code, said) = ended(processes, victim)
    assert (code, other_code) == (-signal.SIGKILL, LOST)
    assert said == f"spmdtrain: process {victim} was lost: killed, or its host is gone\n"
    saved = [event["step"] for event in events(directory) if event["event"] == "saved"]
    newest = newest_step(directory)  # the event of a save that has just become complete may be lost
    more = f"train.steps={newest + 1}"
    outcome = loop.run(settings(tokens, more), directory, devices=jax.devices()[:2])
    assert outcome.status == "finished"
    [resumed] = [event["from_step"] for event in events(directory) if event["event"] == "resumed"]
    assert resumed == newest and newest - max(saved) in (0, EVERY)


# One of the two ends in a way of its own while the other is in nothing that would fail with it.
WORKER = """
import os, signal, sys, time
from spmdtrain.config import ConfigError
from spmdtrain.processes.processes import simulate_devices, start
simulate_devices(1)
start(sys.argv[4], int(sys.argv[6]), int(sys.argv[8]))
how, ranks = sys.argv[1:3]
if sys.argv[8] not in ranks: time.sleep(100)
if how == "bug": raise RuntimeError("a bug\\nof two lines")
if how == "mistake": raise ConfigError("nonsense")
if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
"""
GONE = "process {} was lost: killed, or its host is gone"


@pytest.mark.parametrize(
    ("how", "rank", "own_code", "own_line", "news"),
    [
        ("bug", 0, 1, "of two lines", r"process 0 failed: RuntimeError('a bug\nof two lines')"),
        ("bug", 1, 1, "of two lines", r"process 1 failed: RuntimeError('a bug\nof two lines')"),
        ("mistake", 0, 4, "spmdtrain: nonsense", "process 0 failed: nonsense"),
        ("kill", 1, -signal.SIGKILL, "", GONE.format(1)),
        ("exit", 1, 0, "", GONE.format(1)),
    ],
)
def test_the_other_ends_whatever_it_waits_for(how, rank, own_code, own_line, news):
    with two("-c", WORKER, how, str(rank)) as processes:
        ends = ended(processes, rank)
    assert ends[rank][0] == own_code and ends[rank][1].strip().endswith(own_line)
    assert ("Traceback" in ends[rank][1]) == (how == "bug")
    assert ends[1 - rank] == (LOST, f"spmdtrain: {news}\n")


def test_the_same_mistake_is_said_by_each():
    with two("-c", WORKER, "mistake", "01") as processes:
        assert ended(processes, 0) == [(4, "spmdtrain: nonsense\n")] * 2
