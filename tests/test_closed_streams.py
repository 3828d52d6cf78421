"""A program that is started without its standard streams, or with full ones, does what it does."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdtrain.cli import command
from spmdtrain.cli.planning import schedule

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, sys
from spmdtrain.cli import main
code = main()
sys.stdin.read()
assert not sys.stdout.isatty()
assert os.open(os.devnull, os.O_RDONLY) > 2, "a file has the number of a standard stream"
os._exit(code)
"""


def ended(arguments: str, streams: str) -> int:
    program = [sys.executable, "-c", PROGRAM, *arguments.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.call(["sh", "-c", f'"$@" {streams}', "sh", *program], env=environment)


@pytest.mark.parametrize(
    ("streams", "code"), [("<&- >&- 2>&-", 4), ("<&- 2>/dev/full", 4), ("<&- 2</dev/null", 4)]
)
def test_an_error_keeps_its_code(streams, code):
    assert ended("trian", streams) == code


@pytest.mark.parametrize(("how", "number"), [(os.O_RDONLY, 10), (os.O_WRONLY, 0)])
def test_an_output_that_takes_nothing_is_a_line(how, number, monkeypatch, capsys):
    """As where `1<FILE` was typed for `1>FILE`."""
    with os.fdopen(os.open(os.devnull, how), "w", closefd=True) as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert command.run(["schedule", "--stages", "2", "--microbatches", "2"]) == number
    said = capsys.readouterr().err
    assert said.startswith("spmdtrain: cannot write to standard output") == bool(number)


def test_another_full_disk_is_not_blamed_on_the_output(monkeypatch, capsys):
    """A library's write has no name of a file in its error, as one to standard output has none."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(schedule, "run_schedule", full)
    assert command.run(["schedule", "--stages", "2", "--microbatches", "2"]) == 10
    assert capsys.readouterr().err == "spmdtrain: cannot write: No space left on device\n"
