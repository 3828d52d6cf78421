"""The list of breakages keeps step with the code: each still has a place where it can be made."""

import ast
from pathlib import Path

import pytest

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
