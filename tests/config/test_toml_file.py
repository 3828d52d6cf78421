"""TOML files and `--set` strings that are not meant well: one line each, and soon."""

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdtrain.config import ConfigError, load
from spmdtrain.config.near import nearest
from spmdtrain.config.toml_file import parse_toml

DEEP = 100_000
BAD = {
    "lists": "[model.extra]\nx = " + "[" * DEEP + "]" * DEEP,
    "tables": "[model.extra]\nx = " + "{a = " * DEEP + "1" + "}" * DEEP,
    "not closed": "x = " + "[" * DEEP,
    "parts of a key": ".".join("a" * 50_000) + " = 1",
    "quoted parts of a header": "[" + ".".join(['"a"'] * 50_000) + "]",
    "parts with spaces": " . ".join(["a", "'b'"] * 25_000) + " = 1",
    "digits": "[train]\nsteps = " + "9" * 5000,
    "hexadecimal digits": "[train]\nsteps = 0x" + "f" * 5000,
    "digits of a float": "[optimizer]\nlearning_rate = " + "9" * 5000 + ".0",
    "one long word": "x" * 1_000_000,
    "a string without end": 'x = """' + "y" * 1_000_000,
    "quotes": "x = " + '"' * 100_001,
    "NUL in a path": '[data]\ncorpus = "text"\npath = "a\\u0000b"',
    "NUL in a list": '[data]\ncorpus = "text"\npath = ["a", "a\\u0000b"]',
    "NUL in extends": 'extends = "a\\u0000b"',
    "a long name in extends": f'extends = "{"x" * 300}"',
}


def refusal(*arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 2000
    return line


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_goes_too_far_costs_a_line(name, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(BAD[name])
    refusal(path)


@pytest.mark.parametrize(
    "override",
    [
        "model.extra.x=" + "[" * DEEP,
        "model.extra.x=" + "9" * 5000,
        "train.steps=" + "9" * 5000,
        "log.profile=" + "9" * 5000,
        "model.extra." + "a." * DEEP + "a=1",
        "a." * DEEP + "a=1",
        "data.path=\0",
        "x" * DEEP + "=1",
    ],
    ids=lambda text: text[:24].replace("\0", "NUL"),
)
def test_an_override_that_goes_too_far_costs_a_line(override, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('[data]\ncorpus = "text"\npath = "a"\n')
    refusal(path, [override])


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / ("x" * 300)):
        refusal(path)


def test_a_pipe_of_the_shell_is_read():
    """`spmdtrain show <(sed ... x.toml)`."""
    read, write = os.pipe()
    os.write(write, b"[train]\nsteps = 700\n")
    os.close(write)
    try:
        assert load(f"/dev/fd/{read}").train.steps == 700
    finally:
        os.close(read)


def test_files_that_extend_each_other_without_end_are_refused(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"\n')
    assert "extend each other" in refusal(tmp_path / "0.toml")


VALUES = st.recursive(
    st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.text("ab.[]{}\"'#\\\n", max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab.#[", min_size=1), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text("ab.\"'#", min_size=1), VALUES, max_size=4))
@example({"a": "./" * 500, "b": ["[" * 500], "c": "a.b" * 200})
def test_the_bounds_refuse_nothing_that_is_within_them(table):
    """Dots, brackets and hashes inside strings are none of TOML's own."""
    from spmdtrain.config.load import _toml_key, _toml_value

    text = "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in table.items())
    assert parse_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("zero-bubble", "zero_bubble"),
        ("interleave", "interleaved"),
        ("1e9", ""),
        ("", ""),
    ],
)
def test_a_name_that_is_nearly_one(typed, meant):
    assert nearest(typed, ["gpipe", "1f1b", "interleaved", "zero_bubble"]) == meant
