"""A run directory from somebody else: nothing outside it is read or written, nothing in it runs,
memory is bounded.
"""

import contextlib
import os
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from faults.hostile import ATTACKS, LEAF, Case
from helpers import tiny

from spmdtrain.checkpoints import restore
from spmdtrain.checkpoints.saved_steps import SavedSteps
from spmdtrain.config.errors import UserError
from spmdtrain.running import loop
from spmdtrain.train.shard import shard

pytestmark = pytest.mark.long

SETTINGS = ("model.layers=1", "model.embed=16", "train.global_batch=2", "train.steps=1")
ONE = jax.devices()[:1]
MOST_GROWTH = 64  # MiB


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    loop.run(tiny(*SETTINGS), directory, devices=ONE)
    return directory


def peak() -> float:
    """MiB, the most that this process has held up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("reader", ["state", "weights"])
def test_it_is_refused_in_one_line(attack, reader, saved, tmp_path):
    case = Case(tmp_path)
    shutil.copytree(saved, case.run)
    attack(case)
    setup = shard(tiny(*SETTINGS), devices=ONE)
    before, inside, held = case.files(), sorted(case.run.rglob("*")), peak()
    with pytest.raises(UserError) as raised:
        restore.restore(case.run, setup) if reader == "state" else restore.weights(case.run)
    assert raised.value.exit_code == 6 and "\n" not in str(raised.value)
    assert case.files() == before and sorted(case.run.rglob("*")) == inside, "something was written"
    assert peak() - held < MOST_GROWTH


def test_without_an_attack_both_read(saved, tmp_path):
    case = Case(tmp_path)
    shutil.copytree(saved, case.run)
    case.change_meta(lambda _: None)
    case.change_tree(lambda _: None)
    state = restore.restore(case.run, shard(tiny(*SETTINGS), devices=ONE))
    assert np.array_equal(restore.weights(case.run)[LEAF], np.asarray(state.params[LEAF]))
    with contextlib.closing(SavedSteps(case.run)) as checkpoints:
        assert checkpoints.steps() == [1]


@pytest.mark.parametrize(
    "name", ["lock", "metrics.jsonl", "events.jsonl", "config.json", "checkpoints"]
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_writes_through_no_link(name, fresh, saved, tmp_path):
    case = Case(tmp_path)
    shutil.copytree(saved, case.run)
    path = case.run / name
    target = case.outside / ("x" if name == "checkpoints" else "file")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)
    before = case.files()
    with pytest.raises(UserError, match=f"{name} is a link.* leads to .*outside"):
        loop.run(tiny(*SETTINGS, "train.steps=2"), case.run, devices=ONE, fresh=fresh)
    assert case.files() == before and os.path.lexists(path)
