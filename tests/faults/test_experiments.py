"""Every experiment of the page has a case or a test that is there."""

from pathlib import Path

import pytest

from faults.cases import CASES
from faults.experiments import EXPERIMENTS

TESTS = Path(__file__).parents[1]
NAMES = {case.name for case in CASES}


@pytest.mark.parametrize("what", EXPERIMENTS)
def test_its_proof_is_there(what):
    for proof in EXPERIMENTS[what]:
        file, _, test = proof.partition("::")
        assert proof in NAMES or f"def {test}(" in (TESTS / file).read_text(), proof


def test_every_case_proves_something():
    assert NAMES & {proof for proofs in EXPERIMENTS.values() for proof in proofs} == NAMES
