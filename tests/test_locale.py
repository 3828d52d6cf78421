"""A terminal or a log whose encoding is not UTF-8: no letter is lost, and nothing ends for it."""

import argparse
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.cli.shared_arguments import text

TEXT = "café 日本 \U0001f642 \udcff"  # the last is a byte of a file name that is not UTF-8
PROGRAM = f"""
import types
from spmdtrain import cli
from spmdtrain.cli import command as commands
from spmdtrain.config import DataError

def command(_):
    print({ascii(TEXT)})
    raise DataError({ascii(TEXT)})

commands.make_parser = lambda _: types.SimpleNamespace(
    parse_args=lambda _: types.SimpleNamespace(command=command, options=(), settable=())
)
raise SystemExit(cli.main())
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "utf-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_what_an_encoding_lacks_is_shown_as_escapes(environment):
    """On both streams."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, env=os.environ | environment
    )
    assert done.returncode == 5, done.stderr
    encoding = environment.get("PYTHONIOENCODING", "ascii")
    shown = TEXT.encode(encoding, errors="backslashreplace")
    assert done.stdout == shown + b"\n"
    assert done.stderr == b"spmdtrain: " + shown + b"\n"


@given(st.text())
def test_a_prompt_is_what_was_typed(typed):
    assert text(typed) == typed
    assert text(typed.encode().decode("ascii", errors="surrogateescape")) == typed


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="not UTF-8"):
        text("caf\udcff")
