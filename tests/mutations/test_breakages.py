"""The list of breakages keeps step with the code: each still has a place where it can be made."""

from pathlib import Path

import pytest

from tests.mutations.breakages import BREAKAGES

LIBRARY = Path(__file__).parent.parent.parent / "spmdtrain"


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.what)
def test_a_breakage_has_one_place(breakage):
    assert (LIBRARY / breakage.file).read_text().count(breakage.before) == 1
    assert breakage.before != breakage.after


def test_there_are_forty_and_no_two_are_the_same():
    assert len(BREAKAGES) >= 40
    assert len({(each.file, each.before, each.after) for each in BREAKAGES}) == len(BREAKAGES)
