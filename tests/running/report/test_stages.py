"""What a command says before it has anything to show."""

import io
import re
import sys
import time

import jax
import pytest
from helpers import tiny

from spmdtrain.cli import main
from spmdtrain.cli.run import train
from spmdtrain.config import ConfigError
from spmdtrain.processes.scheduler import is_first
from spmdtrain.running import loop
from spmdtrain.running.report import stages
from spmdtrain.running.report.progress import tell

SMALL = ("model.layers=1", "model.embed=8", "model.heads=1")
NUMBERS = re.compile(r"\[\d+\.\d s\] ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines as a person sees them at last, without times."""
        text = re.sub(r"[^\n]*\x1b\[2K", "", self.getvalue())
        return [NUMBERS.sub("", line) for line in text.split("\n")]


def words(text: str) -> list[str]:
    return [NUMBERS.sub("", line) for line in text.splitlines() if NUMBERS.match(line)]


@pytest.mark.parametrize("process", [(), ("--process", "1")], ids=["alone", "process 1"])
def test_the_first_line_is_out_before_jax_is_imported(tmp_path, monkeypatch, capfd, process):
    def start_jax(*_, **__):
        raise ConfigError(f"so far: {capfd.readouterr().out!r}")

    monkeypatch.setattr(train, "start_jax", start_jax)
    (tmp_path / "run.toml").write_text("")
    more = ["--coordinator", "localhost:1", "--processes", "2", *process] if process else []
    assert main(["train", str(tmp_path / "run.toml"), *more]) == ConfigError.exit_code
    said = "" if process else "[0.0 s] starting jax\n"
    assert capfd.readouterr().err == f"spmdtrain: so far: {said!r}\n"


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": ""}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
    ],
)
def test_one_process_of_many_speaks(environment, first):
    assert is_first(None, environment) == first
    assert is_first(0, environment) and not is_first(2, environment)


@pytest.mark.long
def test_a_run_names_its_stages_in_a_log_and_a_resumed_one_too(tmp_path, monkeypatch):
    for steps, stage in (1, "making the first weights"), (2, None):
        log = io.StringIO()
        monkeypatch.setattr("sys.stdout", log)
        with stages.shown():
            loop.run(tiny(f"train.steps={steps}", *SMALL), tmp_path, devices=jax.devices()[:1])
        want = ["opening the data", "making the model", "looking for a checkpoint"]
        new = ["tracing the step"]
        want[2:2] = new if stage else []
        want += [stage] if stage else new
        assert words(log.getvalue()) == [*want, "compiling the step"]


def test_a_terminal_has_one_live_line_and_keeps_none_of_it(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(stages, "BLINK", 0.01)
    with stages.shown():
        stages.enter("starting jax")
        while terminal.getvalue().count("starting jax") < 3:  # the clock goes on
            time.sleep(0.01)
        tell("a line that stays")
        stages.enter("opening the data")
        assert terminal.screen() == ["a line that stays", "opening the data"]
        stages.end()
        tell("another one")
    assert terminal.screen() == ["a line that stays", "another one", ""]


def test_a_long_stage_is_not_silent_in_a_log(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(stages, "SILENCE", 0.01)
    with stages.shown(log):
        stages.enter("compiling the step")
        while len(words(log.getvalue())) < 3:
            time.sleep(0.01)
    said = words(log.getvalue())
    assert said[:2] == ["compiling the step", "still compiling the step"]
    count = len(log.getvalue())
    time.sleep(0.05)
    assert len(log.getvalue()) == count, "nothing is said after the end"


def test_an_error_ends_the_live_line_and_a_closed_stream_harms_nothing():
    terminal = Terminal()
    with pytest.raises(KeyError), stages.shown(terminal):
        stages.enter("opening the data")
        raise KeyError
    assert terminal.screen() == [""]
    with stages.shown(terminal):
        stages.enter("opening the data")
        terminal.close()
        stages.enter("making the model")
    with stages.shown(sys.stdout, quiet=True):
        stages.enter("nobody asked")
