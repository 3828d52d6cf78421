"""The battery on a small scale: the same cases, a few times each. What takes long runs with `-m
slow` only.
"""

import pytest
from shares import rest

from faults.cases import CASES
from faults.turns import Turns

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("shared_programs"),
    rest("breaks many times what tests of checkpoints/ and running/guards/ break once"),
]


# They start processes, in pairs and often.
SLOW = {
    "soak",
    "fewer",
    "watched",
    "bad steps",
    "SIGKILL of a rank",
    "failures",
    "asked to end",
    "damage for two",
    "slow disk",  # its promise is one of seconds: on a machine without other work only
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name in SLOW else [])
        for case in CASES
    ],
)
def test_the_promise_is_kept(case, tmp_path):
    figures = case.run(tmp_path, Turns(case.quick))
    print(figures)
    assert figures["passed"], figures
