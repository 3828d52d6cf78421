"""The list of planted breakages keeps step with the code."""

import ast
from pathlib import Path

import pytest

from tests.certified.planted import ANEW, planted
from tests.mutations.place import broken, places_of

LIBRARY = Path(__file__).parents[2] / "spmdtrain"


@pytest.mark.parametrize("breakage", ANEW, ids=lambda breakage: breakage.what)
def test_a_planted_breakage_has_one_place(breakage):
    source = (LIBRARY / breakage.file).read_text(encoding="utf-8")
    assert len(places_of(source, breakage.before)) == 1
    changed = ast.parse(broken(source, breakage.before, breakage.after))
    assert ast.dump(changed) != ast.dump(ast.parse(source))


def test_there_are_fifty_and_eleven_are_planted_anew():
    names = [each.breakage.what for each in planted()]
    assert len(names) >= 50 and len(set(names)) == len(names) and len(ANEW) == 11
