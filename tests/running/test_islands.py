"""Islands train apart and meet: equal after a meeting on any mesh, resumed to the bit, never held
up by one that is gone.

Each island is a run of its own in a thread of its own, on devices of its own; or, where a test says
so, in processes of its own.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from helpers import CHEAP_FLAGS, assert_same_bits, mesh_of, tiny

import spmdtrain as st
from spmdtrain.config import to_toml
from spmdtrain.running import loop
from spmdtrain.running.saves import Saves
from spmdtrain.train.state import TrainState

pytestmark = pytest.mark.long

SMALL = (
    "model.embed=16",
    "model.vocab=32",
    "model.layers=1",
    "train.sequence_length=8",
    "train.global_batch=4",
    "optimizer.schedule=constant",
    "checkpoint.every=2",
    "checkpoint.keep=20",
    "islands.count=2",
    "islands.every=4",
    "islands.patience=600.0",
)
MESHES = ((), ("mesh.fsdp=2",))  # islands need not be alike
STEPS = 12
MORE = (f"train.steps={STEPS}", "islands.after=4", "islands.codec=int8")


def settings(root: Path, index: int, *more: str) -> tuple[str, ...]:
    own = (f"islands.index={index}", f"islands.directory={root / 'meetings'}")
    return (*SMALL, *MESHES[index], *own, *more)


def train(root: Path, index: int, *more: str, stop: int | None = None) -> loop.Outcome:
    """One island; `stop`: the step after which it is gone."""
    all_settings = settings(root, index, *MORE, *more)
    first = 2 * index
    devices = jax.devices()[first : first + mesh_of(MESHES[index])]
    hooks = [lambda event, step, _: event == "step" and step == stop]
    return loop.run(tiny(*all_settings), root / str(index), devices=devices, hooks=hooks)


@pytest.fixture(scope="module", autouse=True)
def one_save_at_a_time():
    """Orbax counts its operations for the whole process: two runs in one must take turns."""
    turn, save = threading.Lock(), Saves.save

    def alone(self, step, state):
        with turn:
            save(self, step, state)
            self.checkpoints.wait()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Saves, "save", alone)
        yield


def together(root: Path, *more: str, stop: int | None = None) -> list[loop.Outcome]:
    with ThreadPoolExecutor(2) as threads:
        started = [threads.submit(train, root, i, *more, stop=stop) for i in range(2)]
        return [each.result(timeout=300) for each in started]


def state_of(root: Path, index: int, step: int, *more: str) -> TrainState:
    config = tiny(*settings(root, index, *(more or MORE)))
    setup = st.shard(config, devices=jax.devices()[: mesh_of(MESHES[index])])
    return st.restore(root / str(index), setup, step=step)


def events(root: Path, index: int, name: str) -> list[dict]:
    file = root / str(index) / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [each for each in map(json.loads, lines) if each["event"] == name]


def shared(state: TrainState) -> dict:
    return {"params": state.params, "items": state.items}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("islands")
    assert [each.status for each in together(root)] == ["finished"] * 2
    return root


def as_at(trained: Path, root: Path, step: int) -> None:
    """Copies what the islands had on disk after `step`: killed then, say."""
    shutil.copytree(trained, root, dirs_exist_ok=True)
    for index in range(2):
        for later in range(step + 2, STEPS + 1, 2):
            shutil.rmtree(root / str(index) / "checkpoints" / str(later))


@pytest.mark.core
def test_all_are_equal_after_a_meeting_and_apart_before_it(trained):
    assert_same_bits(*(shared(state_of(trained, index, 8)) for index in range(2)))
    between = state_of(trained, 0, 6)
    outer = between.items["outer"]
    assert max(float(abs(x - outer[path]).max()) for path, x in between.params.items()) > 1e-4
    met = events(trained, 0, "met")
    assert [each["step"] for each in met] == [1, 2, 3, 4, 8, 12]
    assert all(each["islands"] == {"0": 4, "1": 4} for each in met)


def test_an_island_that_resumes_repeats_its_meetings_to_the_bit(trained, tmp_path):
    as_at(trained, tmp_path, 6)
    assert train(tmp_path, 1, "islands.patience=0.0").status == "finished"  # the other is gone
    assert_same_bits(state_of(tmp_path, 1, STEPS), state_of(trained, 1, STEPS))


@pytest.fixture(scope="module")
def met_alone(trained, tmp_path_factory) -> Path:
    """Island 1 was gone after step 2, and island 0 has met alone; old meetings are gone."""
    root = tmp_path_factory.mktemp("alone")
    as_at(trained, root, 2)
    for step in (8, 12):
        shutil.rmtree(root / "meetings" / f"{step:09d}")
    train(root, 0, "islands.patience=0.0", "islands.keep=1", stop=8)
    assert events(root, 0, "met")[-1]["islands"] == {"0": 4}
    return root


@pytest.fixture(scope="module")
def back(met_alone, tmp_path_factory) -> Path:
    """Island 1 came back, and has promised to be at the next meeting."""
    root = tmp_path_factory.mktemp("back")
    shutil.copytree(met_alone, root, dirs_exist_ok=True)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(train, root, 1)
        wait_until((root / "meetings" / "promised" / f"{STEPS:09d}-1").exists)
        assert train(root, 0).status == late.result(timeout=300).status == "finished"
    return root


def test_an_index_that_is_taken_twice_is_refused_before_the_first_step(trained, tmp_path):
    """By which the second would have trained on the samples of the first, and left nothing."""
    as_at(trained, tmp_path, 4)
    shutil.rmtree(tmp_path / "0")
    with pytest.raises(st.UserError, match=r"islands.index=0 is taken"):
        train(tmp_path, 0)
    assert not events(tmp_path, 0, "first_step")
    with pytest.raises(st.UserError, match=r"island 1 of islands.count=2 did not come"):
        train(tmp_path / "not shared", 0, "islands.patience=0.0")
    assert not events(tmp_path / "not shared", 0, "first_step")


def assert_leapt_and_met(root: Path) -> None:
    leapt = events(root, 1, "leapt")[0]
    assert (leapt["step"], leapt["to_step"]) == (2, 8)
    for index in range(2):
        assert events(root, index, "met")[-1]["islands"] == {"0": 4, "1": 4}


def test_an_island_that_was_away_leaps_and_all_are_equal_at_the_next_meeting(back):
    assert_leapt_and_met(back)
    assert_same_bits(*(shared(state_of(back, index, STEPS)) for index in range(2)))


def wait_until(condition, *programs: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert all(each.poll() is None for each in programs) and time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_ends_the_waiting_and_the_meeting_is_taken_later_to_the_bit(trained, tmp_path):
    as_at(trained, tmp_path, 4)
    for step in (8, 12):
        shutil.rmtree(tmp_path / "meetings" / f"{step:09d}")

    def end_while_it_waits():
        wait_until((tmp_path / "meetings" / f"{8:09d}" / "change-0").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_while_it_waits).start()
    outcome = train(tmp_path, 0)
    assert (outcome.status, outcome.step) == ("preempted", 8)
    assert int(state_of(tmp_path, 0, 8).items["unmet"]) == 8
    assert [each.status for each in together(tmp_path)] == ["finished"] * 2
    for index in range(2):
        assert_same_bits(state_of(tmp_path, index, STEPS), state_of(trained, index, STEPS))


@pytest.fixture
def launched(request):
    """`launched(root, index, processes, *more)`: an island under a launcher of its own."""

    def start(root: Path, index: int, processes: int, *more: str) -> subprocess.Popen:
        config = root / f"{index}.toml"
        config.write_text(to_toml(tiny(*settings(root, index, *more))), encoding="utf-8")
        devices = str(mesh_of(MESHES[index]) // processes)
        watched = ("launch", "--local-processes", str(processes), "train", str(config))
        rest = ("--run", str(root / str(index)), "--simulate-devices", devices)
        program = subprocess.Popen(
            [sys.executable, "-m", "spmdtrain.cli", *watched, *rest],
            env=os.environ | {"XLA_FLAGS": CHEAP_FLAGS},
        )
        request.addfinalizer(program.terminate)
        return program

    return start


def kill(root: Path, index: int) -> None:
    """Ends process 0 of an island, which its launcher then starts again with the others."""
    os.kill(events(root, index, "launched")[-1]["pid"], signal.SIGKILL)


def test_an_island_of_two_processes_is_one_of_two_devices_even_if_one_is_killed(
    met_alone, back, tmp_path, launched
):
    shutil.copytree(met_alone, tmp_path, dirs_exist_ok=True)
    island = launched(tmp_path, 1, 2, *MORE)
    wait_until((tmp_path / "meetings" / f"{STEPS:09d}" / "change-1").exists, island)
    kill(tmp_path, 1)  # while both of its processes wait for the other island
    wait_until(lambda: len(events(tmp_path, 1, "launched")) == 2, island)
    assert train(tmp_path, 0).status == "finished"
    assert island.wait(timeout=300) == 0
    assert_leapt_and_met(tmp_path)
    for index in range(2):
        assert_same_bits(state_of(tmp_path, index, STEPS), state_of(back, index, STEPS))
