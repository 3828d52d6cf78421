"""The list of breakages keeps step with the code: each still has a place where it can be made."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certified.planted import ANEW
from tests.mutations.breakages import BREAKAGES
from tests.mutations.place import broken, places_of

LIBRARY = Path(__file__).parent.parent.parent / "spmdtrain"


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.what)
def test_a_breakage_has_one_place(breakage):
    source = (LIBRARY / breakage.file).read_text()
    assert len(places_of(source, breakage.before)) == 1
    assert ast.dump(ast.parse(broken(source, breakage.before, breakage.after))) != ast.dump(
        ast.parse(source)
    )


@pytest.mark.parametrize("breakages", [BREAKAGES, ANEW], ids=["mutations", "planted anew"])
def test_a_breakage_uses_names_that_its_file_has(breakages, tmp_path):
    """Else a test sees the NameError, and not the breakage."""
    for number, breakage in enumerate(breakages):
        source = (LIBRARY / breakage.file).read_text()
        made = broken(source, breakage.before, breakage.after)
        (tmp_path / f"{number}.py").write_text(made)
    ruff = Path(sys.executable).parent / "ruff"
    options = ["--isolated", "--no-cache", "--select=F821", "--output-format=concise"]
    done = subprocess.run([ruff, "check", *options, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


SOURCE = """
def f(x):
    # why
    if x:
        return g(x, "a # b")
    return g(x)
"""


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ('return g(\n    x,  # first\n    "a # b",\n)', "return x", "        return x"),
        ("return g(x)", "return 0", "    return 0"),
        ("    if x:\n        return", "    if not x:\n        return", "    if not x:"),
    ],
    ids=["in other lines", "once", "two lines"],
)
def test_a_place_is_found_by_its_tokens(before, after, line):
    made = broken(SOURCE, before, after)
    assert line in made.splitlines() and len(made.splitlines()) == len(SOURCE.splitlines())
    ast.parse(made)


def test_there_are_forty_and_no_two_are_the_same():
    assert len(BREAKAGES) >= 40
    assert len({(each.file, each.before, each.after) for each in BREAKAGES}) == len(BREAKAGES)
