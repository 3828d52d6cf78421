"""The planted cause of a spike is found by taking the step again with one thing changed."""

import numpy as np
import pytest
from fuzz import programs
from planted import BAD, BATCH, CAUSES, SAVED, explained, planted

from spmdtrain.cli.record.explain import describe
from spmdtrain.lab.replay.explain import explain
from spmdtrain.lab.replay.spike import deviations, is_healed, recent

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


def test_a_wrong_weight_that_no_figure_shows_is_found_at_the_next_checkpoint(tmp_path):
    with programs.shared():
        found = explained(tmp_path / "run", 13, "machine")  # the embedding of an id without samples
    assert (found.cause, found.first.kind) == ("machine", "leaf")
    assert found.seen < 1 and found.first.step > BAD + 1
    assert "some steps later" in describe(found)


def test_a_step_is_judged_without_those_that_had_other_settings(tmp_path):
    with programs.shared():
        given = planted(tmp_path / "run", 1, "rate")
        assert explain(tmp_path / "run", SAVED, **given).cause == "ordinary"


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
