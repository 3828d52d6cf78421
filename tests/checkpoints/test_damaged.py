"""A run goes on from the newest checkpoint that is as it was saved, whatever has become of the
others.
"""

import contextlib
import json
import random
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from faults.damage import cut, flip_bit
from helpers import assert_same_bits, tiny

import spmdtrain as st
from spmdtrain.checkpoints import restore
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.newest import newest_good
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.cli import main
from spmdtrain.config.errors import CheckpointError, DamagedError
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.running import loop
from spmdtrain.train.setup import Setup
from spmdtrain.train.shard import shard

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_programs")]

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
    with contextlib.closing(
        Checkpoints(run, setup, keep=Retention(CheckpointConfig(keep=3)))
    ) as checkpoints:
        return newest_good(checkpoints, setup.state)


def newest(run: Path) -> Path:
    return run / "checkpoints" / str(NEWEST)


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


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


FELL_BACK = (
    "/checkpoints/3 is damaged: .* is damaged: its fingerprint differs.*; step 2 is read instead\n"
)


def test_who_only_reads_gets_the_newest_good_step_and_changes_nothing(run, setup, truth, capsys):
    """In Python and at the command line; one line on standard error says so."""
    alter_data(run)
    before = files_of(run)
    assert_same_bits(restore.restore(run, setup), truth[NEWEST - 1])
    assert re.fullmatch(f"spmdtrain: checkpoint .*{FELL_BACK}", capsys.readouterr().err)
    found = restore.weights(run)
    assert found.keys() == truth[NEWEST - 1].params.keys()
    for path, weight in found.items():
        assert np.array_equal(weight, truth[NEWEST - 1].params[path])
    assert re.fullmatch(f"spmdtrain: checkpoint .*{FELL_BACK}", capsys.readouterr().err)
    assert main(["eval", str(run), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["step"] == NEWEST - 1
    assert re.fullmatch(f"spmdtrain: checkpoint .*{FELL_BACK}", said.err)
    st.generate(run, [1, 2], 2)
    assert re.fullmatch(f"spmdtrain: checkpoint .*{FELL_BACK}", capsys.readouterr().err)
    assert files_of(run) == before


def test_a_damaged_step_that_was_asked_for_is_refused_and_a_good_one_named(run, setup, capsys):
    alter_data(run)
    shutil.rmtree(run / "checkpoints" / str(NEWEST - 1) / "params")
    before = files_of(run)
    says = r"checkpoints/3 is damaged: .* is damaged: its fingerprint differs.*; try --step 1$"
    with pytest.raises(DamagedError, match=says):
        restore.restore(run, setup, NEWEST)
    with pytest.raises(DamagedError, match=says):
        restore.weights(run, NEWEST)
    assert main(["eval", str(run), "--step", str(NEWEST)]) == CheckpointError.exit_code
    assert re.fullmatch("spmdtrain: checkpoint .*; try --step 1\n", capsys.readouterr().err)
    assert restore.weights(run, 1).keys() == setup.state.params.keys()
    shutil.rmtree(run / "checkpoints" / "1" / "params")
    with pytest.raises(
        DamagedError, match="its fingerprint differs.*; try another run: no step of this"
    ):
        restore.weights(run, NEWEST)
    with pytest.raises(CheckpointError, match="all 3 checkpoints of the run are damaged; "):
        restore.weights(run)
    assert files_of(run).items() <= before.items()


def test_another_run_begins_with_the_newest_good_weights(run, capsys):
    alter_data(run)
    other = run.parent / "other"
    loop.run(tiny(*SETTINGS, f"train.init_from={run}"), other, **ONE)
    said = capsys.readouterr()
    assert re.search(FELL_BACK, said.out) and said.err == ""
    assert newest(run).is_dir()


def test_a_step_that_begins_with_another_name_is_none(run, setup):
    """What a kill leaves behind, and files that somebody put there."""
    checkpoints = run / "checkpoints"
    shutil.copytree(newest(run), checkpoints / "9.orbax-checkpoint-tmp")
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / "7").write_text("a file")
    assert found_in(run, setup).step == NEWEST
