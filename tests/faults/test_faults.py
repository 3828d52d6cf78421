"""The battery on a small scale: the same cases, a few times each. What takes long runs with `-m
slow` only.
"""

import pytest

from faults.cases import CASES

pytestmark = pytest.mark.long


SLOW = {"soak", "fewer", "watched", "bad steps"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name in SLOW else [])
        for case in CASES
    ],
)
def test_the_promise_is_kept(case, tmp_path):
    figures = case.run(tmp_path, case.quick)
    print(figures)
    assert figures["passed"], figures
