"""A run goes on from the newest checkpoint that is as it was saved, whatever has become of the
others.
"""

import contextlib
import json
import random
import shutil
from pathlib import Path

import jax
import pytest
from faults.damage import cut, flip_bit
from helpers import assert_same_bits, tiny

from spmdtrain.config.errors import CheckpointError, DamagedError
from spmdtrain.running import loop, restore
from spmdtrain.running.checkpoint import Checkpoints
from spmdtrain.running.resume import newest_good
from spmdtrain.train.setup import Setup, shard

pytestmark = pytest.mark.long

ONE = {"devices": jax.devices()[:1]}
SETTINGS = (
    "train.steps=3",
    "checkpoint.every=1",
    "checkpoint.keep=3",
    "train.global_batch=2",
    "model.layers=1",
)
NEWEST = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    loop.run(tiny(*SETTINGS), directory, **ONE)
    return directory


@pytest.fixture(scope="module")
def setup(saved) -> Setup:
    del saved
    return shard(tiny(*SETTINGS), **ONE)


@pytest.fixture
def run(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def truth(saved, setup) -> dict:
    return {step: restore.restore(saved, setup, step) for step in range(1, NEWEST + 1)}


def found_in(run: Path, setup: Setup):
    with contextlib.closing(Checkpoints(run, setup, keep=3)) as checkpoints:
        return newest_good(checkpoints, setup.state)


def newest(run: Path) -> Path:
    return run / "checkpoints" / str(NEWEST)


def event_steps(run: Path, name: str) -> list[int]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == name]


@pytest.mark.parametrize(("break_it", "times"), [(flip_bit, 24), (cut, 16)])
def test_what_is_read_is_what_was_saved_or_the_step_before(
    saved, setup, truth, tmp_path, break_it, times
):
    draw = random.Random(0)
    fell_back = 0
    for number in range(times):
        run = tmp_path / str(number)
        shutil.copytree(saved, run)
        what = break_it(newest(run), draw)
        found = found_in(run, setup)
        assert found.step in (NEWEST, NEWEST - 1), what
        assert_same_bits(found.state, truth[found.step])
        assert bool(found.damaged) == (found.step != NEWEST), what
        fell_back += bool(found.damaged)
        shutil.rmtree(run)
    assert fell_back, "nothing that was broken is read"


def test_a_checkpoint_that_nobody_touched_is_not_accused(saved, setup, truth):
    found = found_in(saved, setup)
    assert (found.step, found.damaged) == (NEWEST, {})
    assert_same_bits(found.state, truth[NEWEST])


def alter_data(run: Path) -> None:
    """A bit in the middle of the largest array, which nothing but its fingerprint protects."""
    path = max((newest(run) / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(run: Path) -> None:
    shutil.rmtree(newest(run))
    newest(run).mkdir()


def alter_position(run: Path) -> None:
    """Another number of samples seen: valid JSON, and nothing but the digest protects it."""
    path = newest(run) / "meta" / "metadata"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"sample": meta["sample"] + 1}))


@pytest.mark.parametrize("break_it", [alter_data, empty, alter_position])
def test_the_run_goes_on_from_the_step_before_by_itself(run, break_it, capsys):
    """It says so, keeps what is damaged, and ends as if nothing had been."""
    before = (run / "metrics.jsonl").read_text().splitlines()
    break_it(run)
    assert loop.run(tiny(*SETTINGS), run, **ONE) == loop.Outcome("finished", NEWEST)
    assert event_steps(run, "quarantined") == [NEWEST]
    assert event_steps(run, "resumed") == [NEWEST - 1]
    said = capsys.readouterr().out
    assert (
        f"checkpoints/{NEWEST} is damaged: " in said and "is now in checkpoints/quarantine" in said
    )
    assert (run / "checkpoints" / "quarantine" / str(NEWEST)).is_dir()
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [json.loads(line)["loss"] for line in before]


def test_a_second_damaged_step_of_one_number_is_kept_too(run):
    for _ in range(2):
        alter_data(run)
        loop.run(tiny(*SETTINGS), run, **ONE)
    names = {path.name for path in (run / "checkpoints" / "quarantine").iterdir()}
    assert names == {f"{NEWEST}", f"{NEWEST}.1"}


def test_a_run_does_not_begin_anew_where_all_is_damaged(run):
    for step in range(1, NEWEST + 1):
        shutil.rmtree(run / "checkpoints" / str(step) / "params")
    with pytest.raises(
        CheckpointError, match="all 3 checkpoints of the run are damaged; .*params is missing"
    ):
        loop.run(tiny(*SETTINGS), run, **ONE)
    assert not (run / "checkpoints" / "quarantine").exists()
    assert CheckpointError.exit_code == 6


def test_who_only_reads_is_refused_and_changes_nothing(run, setup):
    """Weights for another run, for a sample, for a notebook."""
    alter_data(run)
    says = r"checkpoints/3 is damaged: .* is not as it was saved; try resuming the run, .* step 2"
    with pytest.raises(DamagedError, match=says):
        restore.restore(run, setup)
    with pytest.raises(DamagedError, match=says):
        restore.weights(run)
    with pytest.raises(DamagedError, match=says):
        loop.run(tiny(*SETTINGS, f"train.init_from={run}"), run.parent / "other", **ONE)
    assert newest(run).is_dir()


def test_a_step_that_begins_with_another_name_is_none(run, setup):
    """What a kill leaves behind, and files that somebody put there."""
    checkpoints = run / "checkpoints"
    shutil.copytree(newest(run), checkpoints / "9.orbax-checkpoint-tmp")
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / "7").write_text("a file")
    assert found_in(run, setup).step == NEWEST
