"""The planted cause of a spike is found by taking the step again with one thing changed."""

import numpy as np
import pytest
from fuzz import programs
from planted import BAD, BATCH, CAUSES, explained

from spmdtrain.replay.spike import deviations, is_healed, recent

pytestmark = pytest.mark.long


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(tmp_path, cause):
    with programs.shared():
        found = explained(tmp_path / "run", 1, cause)
    assert found.cause == cause
    if cause == "data":
        first = (BAD - 1) * BATCH
        assert len(found.samples) == 5
        assert all(first <= index < first + BATCH for index, _ in found.samples)
    if cause == "machine":
        assert found.first.step == BAD


def test_a_spike_is_judged_by_the_steps_well_before_it():
    draw = np.random.default_rng(0)
    wrote = {
        step: {"loss": float(2 + 0.01 * draw.normal()), "grad_norm": 1.0} for step in range(1, 60)
    }
    before = recent(wrote, 50)
    assert len(before) == 46
    assert deviations(before, [{"loss": 2.0, "grad_norm": 1.0}]) < 3
    assert deviations(before, [{"loss": 2.2, "grad_norm": 1.0}]) > 10
    assert deviations(before, [{"loss": None, "grad_norm": 1.0}]) == np.inf
    assert deviations(before[:3], [{"loss": 2.2}]) is None
    assert is_healed(40.0, 12.0) and is_healed(6.0, 4.9) and not is_healed(40.0, 25.0)
    assert not is_healed(40.0, None)
