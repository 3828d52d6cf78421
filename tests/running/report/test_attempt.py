"""`launched` and `ended`: what an attempt leaves in the events, however it ends."""

import json
import os
import signal
import time

import jax
import pytest
from helpers import tiny

import spmdtrain as st
from spmdtrain.config import ConfigError
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import newest_line
from spmdtrain.processes import clocks, peers, pulse, signals
from spmdtrain.running.report.attempt import attempt


def ended(directory) -> list[tuple]:
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [
        (each["exit_code"], each["phase"], each["step"], each.get("why", ""))
        for each in lines
        if each["event"] == "ended"
    ]


class Exit(BaseException):
    """A process that ends at once, as far as a test can."""


@pytest.fixture(autouse=True)
def at_work(monkeypatch):
    def leave(_code: int):
        raise Exit

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(pulse, "_phase", pulse.Moment(pulse.COMPILE, 4, time.time()))


def test_an_attempt_without_an_error_ends_with_its_exit_code(tmp_path):
    with attempt(tmp_path, 5.0) as this:
        this.exit_code = 3
    assert ended(tmp_path) == [(3, "compile", 4, "")]
    first = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["time"], first["step"]) == ("launched", 5.0, 0)


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (ConfigError("no such mesh", fix="another"), 4, "no such mesh; try another"),
        (CheckpointError("damaged"), 6, "damaged"),
        (ZeroDivisionError("secret"), 1, "ZeroDivisionError"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    ],
)
def test_an_error_ends_it_with_its_code_and_the_reason(tmp_path, error, code, why):
    with pytest.raises(type(error)), attempt(tmp_path, time.time()):
        raise error
    assert ended(tmp_path) == [(code, "compile", 4, why)]


def test_a_signal_that_ends_the_process_at_once_is_told_once(tmp_path):
    """Such as one while XLA compiles: no `finally` runs."""
    with pytest.raises(Exit), attempt(tmp_path, time.time()):
        signals.end(signal.SIGTERM)
    assert ended(tmp_path) == [(143, "compile", 4, "")]
    signals.note_end(1)
    assert len(ended(tmp_path)) == 1, "it is over"


def test_the_loss_of_another_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_connection", object())
    monkeypatch.setattr(peers, "_say_last", lambda _word: None)
    with pytest.raises(Exit), attempt(tmp_path, time.time()):
        peers.leave(8, "done")
    assert ended(tmp_path) == [(8, "compile", 4, "")]


@pytest.mark.long
def test_settings_that_do_not_fit_what_is_there_are_told(tmp_path):
    """An error after the directory was opened, and before the first step."""
    settings = ("train.steps=1", "train.global_batch=2", "model.layers=1")
    one = jax.devices()[:1]
    st.run(tiny(*settings), tmp_path, devices=one)
    with pytest.raises(CheckpointError):
        st.run(tiny(*settings, "model.embed=16", "train.steps=2"), tmp_path, devices=one)
    (good, *_), (bad, phase, _, why) = ended(tmp_path)
    assert (good, bad, phase) == (0, 6, "restore") and "embed" in why


def test_the_newest_line_is_the_last_whole_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert newest_line(path) == {}
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert newest_line(path) == {"step": 2}
    path.write_bytes(b"\xff\n[1]\n")
    assert newest_line(path) == {}


def test_a_command_was_launched_when_its_process_began():
    began = clocks.process_start()
    assert began <= time.time() and abs(began - clocks.process_start()) < 0.1
    clocks.program_begins()
    assert clocks.launched() == pytest.approx(began, abs=0.1)
    assert clocks.launched() > began, "a second run of the same process is launched when called"
