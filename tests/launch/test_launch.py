"""The launcher against processes that fail in every way: it notices, says what, and starts them
again.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdtrain.config import ConfigError
from spmdtrain.config.errors import HangError, PeerLostError
from spmdtrain.launch import launch as module
from spmdtrain.launch import ranks
from spmdtrain.launch.patience import FACTOR, Patience
from spmdtrain.launch.place import Place, find_place
from spmdtrain.launch.snapshot_memory import HostMemory
from spmdtrain.processes import pulse, signals
from spmdtrain.processes.goodput import Goodput

WORKER = Path(__file__).parent / "worker.py"
DONE, PREEMPTED, HANG, LOST = 0, 3, HangError.exit_code, PeerLostError.exit_code


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`launch(faults, processes) -> (code, launcher)`: the worker in place of the trainer, and
    short waits.
    """
    monkeypatch.setattr(ranks, "PROGRAM", [sys.executable, str(WORKER)])
    monkeypatch.setattr(ranks, "STACKS_SECONDS", 0.3)
    monkeypatch.setattr(ranks, "TERM_SECONDS", 0.3)
    monkeypatch.setattr(module, "EXIT_SECONDS", 0.5)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)

    def start(faults: str, processes: int = 2):
        launcher = module.Launcher([faults, str(tmp_path)], Place(), processes, step_seconds=1.5)
        return launcher.run(), launcher

    return start


def assert_accounted(launcher: module.Launcher, wall: float) -> None:
    report = launcher.goodput.report()
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_seconds"], rel=1e-9)
    assert report["wall_seconds"] == pytest.approx(wall, rel=0.01, abs=0.01)
    assert all(seconds >= 0 for seconds in report["seconds"].values())


@pytest.mark.seconds
def test_a_run_without_a_fault_is_one_attempt(launch, capfd):
    start = time.monotonic()
    code, launcher = launch("")
    assert_accounted(launcher, time.monotonic() - start)
    assert (code, launcher.attempts) == (DONE, 1)
    seconds = launcher.goodput.report()["seconds"]
    assert seconds["step"] >= 12 * 0.05 and seconds["repeated"] == seconds["hang"] == 0
    assert capfd.readouterr().err == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("1:6:kill", "process 1 was ended by SIGKILL, in step 6"),
        ("0:6:kill", "process 0 was ended by SIGKILL, in step 6"),
        ("1:6:1", "process 1 ended with code 1, in step 6"),
        ("1:6:exit", "process 1 ended with code 0 before the run was over, in step 6"),
        ("1:6:sleep", "the run hangs: process "),
        ("1:6:stop", "the run hangs: process "),
        ("1:6:gil", "the run hangs: process "),
    ],
)
def test_after_a_fault_the_run_goes_on_from_what_it_saved(launch, capfd, fault, line):
    start = time.monotonic()
    code, launcher = launch(fault)
    wall = time.monotonic() - start
    said = capfd.readouterr().err
    assert (code, launcher.attempts) == (DONE, 2), said
    assert f"spmdtrain launch: {line}" in said and wall < 15
    assert_accounted(launcher, wall)
    seconds = launcher.goodput.report()["seconds"]
    assert (seconds["hang"] > 1) == ("hangs" in line)
    assert seconds["repeated"] > 0
    if "hangs" in line:  # the stacks of both
        assert (
            all(f"process {rank} in step 6" in said for rank in range(2))
            and "2 s is the limit" in said
        )
        assert said.count("most recent call first") >= 2 and "worker.py" in said


@pytest.mark.seconds
def test_three_attempts_without_a_new_checkpoint_are_the_last(launch, capfd, monkeypatch):
    cleared = []
    monkeypatch.setattr(HostMemory, "clear", lambda _: cleared.append(1))
    code, launcher = launch("1:2:akill")
    assert (code, launcher.attempts) == (LOST, 3)
    assert len(cleared) == 1  # the last attempt does not begin from memory
    assert "3 attempts without a new checkpoint: giving up" in capfd.readouterr().err


@pytest.mark.seconds
def test_a_new_checkpoint_starts_the_count_anew(launch):
    code, launcher = launch("0:2:kill,0:6:akill")  # the second fault comes after step 4 was saved
    assert (code, launcher.attempts) == (LOST, 4)


@pytest.mark.long
@pytest.mark.parametrize("code", [4, 5, 6, 9, 10])
def test_what_would_only_come_again_is_not_tried_again(launch, code):
    assert launch(f"1:3:{code}")[0] == code
    ended, launcher = launch(f"0:6:a{code}", 1)
    assert (ended, launcher.attempts) == (code, 1)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.mark.seconds
def test_a_signal_is_handed_on_and_the_run_saves(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKER_STEPS", "1000")

    def end_after_the_first_save():
        wait_for((tmp_path / "saved.0").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_after_the_first_save).start()
    code, launcher = launch("")
    assert (code, launcher.attempts) == (PREEMPTED, 1)
    assert int((tmp_path / "saved.0").read_text()) > 4


def test_a_second_signal_is_handed_on_when_it_cannot_be_the_first_once_more(monkeypatch):
    monkeypatch.setattr(signals, "HANDED_ON_SECONDS", 0.1)
    launcher = module.Launcher([], Place(), 1, step_seconds=100)
    heard = []

    class Deaf:
        """One process that ends when it has heard two signals."""

        ranks = (ranks.Rank(0, None, 0),)  # pyright: ignore[reportArgumentType]

        def listen(self, seconds: float) -> list:
            time.sleep(seconds / 10)
            return []

        def signal(self, number: int) -> None:
            assert number == signal.SIGTERM
            heard.append(time.monotonic())

        def running(self) -> tuple:
            return self.ranks if len(heard) < 2 else ()

    monkeypatch.setattr(launcher, "_ended", lambda _: module.Ending(PREEMPTED))
    launcher._on_signal(signal.SIGTERM, None)
    launcher._on_signal(signal.SIGTERM, None)
    assert launcher._watch(Deaf()).code == PREEMPTED  # pyright: ignore[reportArgumentType]
    assert heard[1] - heard[0] > 0.1


@pytest.mark.core
@pytest.mark.seconds
def test_no_process_outlives_its_launcher(tmp_path):
    program = f"""
import sys; sys.path.insert(0, {str(Path(module.__file__).parents[2])!r})
from spmdtrain.launch import launch, ranks
from spmdtrain.launch.place import Place
ranks.PROGRAM = [sys.executable, {str(WORKER)!r}]
launch.Launcher(["", {str(tmp_path)!r}], Place(), 1, 100.0).run()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"WORKER_STEPS": "1000"}
    )
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    wait_for((tmp_path / "saved.0").exists)
    [child] = children.read_text().split()
    launcher.kill()
    launcher.wait()
    wait_for(lambda: gone(child))


def gone(pid: str) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_patience_grows_with_what_was_seen():
    patience = Patience(step_seconds=10)
    assert patience.limit(pulse.STEP) == 10
    patience.learn(pulse.STEP, 1)
    assert patience.limit(pulse.STEP) == 10
    patience.learn(pulse.STEP, 4)
    patience.learn(pulse.STEP, 3)
    assert patience.limit(pulse.STEP) == 4 * FACTOR
    assert patience.limit(pulse.COMPILE) > patience.limit(pulse.STEP)


def test_steps_that_are_done_again_do_not_count():
    now = iter([0, 0, 2, 3, 4, 5, 6, 8, 10])
    goodput = Goodput(lambda: next(now))
    goodput.enter(pulse.BEGIN)
    goodput.enter(pulse.STEP, 1)  # from 2
    goodput.enter(pulse.STEP, 2)  # from 3
    goodput.enter(pulse.SAVE, 2)  # from 4
    goodput.enter(pulse.STEP, 3)  # from 5
    goodput.saved(2)
    goodput.failed()  # at 6: step 3 is lost
    goodput.enter(pulse.BEGIN)
    report = goodput.report()
    assert (
        report["seconds"] | {"begin": 4, "step": 2, "save": 1, "repeated": 1, "down": 2}
        == report["seconds"]
    )
    assert report["wall_seconds"] == 10 and report["goodput"] == 0.2


def test_steps_that_the_run_goes_back_before_do_not_count():
    now = iter([0, 0, 1, 3, 6, 10])
    goodput = Goodput(lambda: next(now))
    for step in (1, 2, 3):
        goodput.enter(pulse.STEP, step)
    goodput.enter(pulse.RESTORE, 3)  # at 6
    goodput.undone(1)
    seconds = goodput.report()["seconds"]
    assert (seconds["step"], seconds["repeated"], seconds["restore"]) == (1, 5, 4)


def test_steps_held_in_memory_count_unless_the_run_goes_on_from_before_them():
    def seconds_of(*after: tuple[str, int]) -> dict[str, float]:
        now = iter(range(20))
        goodput = Goodput(lambda: next(now))
        for step in (1, 2, 3):
            goodput.heard(pulse.STEP, step)
            goodput.heard(pulse.SAVE, step)
            if step < 3:
                goodput.heard(pulse.HELD, step)
        goodput.failed()
        for what, step in after:
            goodput.heard(what, step)
        if not after:
            goodput.over()
        return goodput.report()["seconds"]

    resumed = seconds_of((pulse.BEGIN, 0), (pulse.UNDONE, 2))
    assert (resumed["step"], resumed["repeated"]) == (2, 1)
    from_disk = seconds_of((pulse.BEGIN, 0), (pulse.UNDONE, 1))
    assert (from_disk["step"], from_disk["repeated"]) == (1, 2)
    given_up = seconds_of()
    assert (given_up["step"], given_up["repeated"]) == (0, 3)


KUBERNETES = {"SPMDTRAIN_HOSTS": "2", "SPMDTRAIN_HOST": "1", "SPMDTRAIN_COORDINATOR": "first:1234"}


def test_where_this_host_stands():
    assert find_place({}, 2) == Place()
    assert list(find_place(KUBERNETES, 2).flags(2)) == [2, 3]
    told = "--coordinator first:1234 --processes 4 --process 3"
    assert " ".join(find_place(KUBERNETES, 2).flags(2)[3]) == told
    assert find_place({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1).flags(1) == {0: []}
    assert Place().flags(1) == {0: []}


@pytest.mark.parametrize(
    "change", [{"SPMDTRAIN_HOST": "2"}, {"SPMDTRAIN_HOSTS": "x"}, {"SPMDTRAIN_COORDINATOR": ""}]
)
def test_half_a_place_is_refused(change):
    with pytest.raises(ConfigError, match="does not name this host"):
        find_place(KUBERNETES | change, 1)
    with pytest.raises(ConfigError, match="a launcher for each process"):
        find_place({"OMPI_COMM_WORLD_SIZE": "2"}, 2)


@pytest.mark.parametrize("line", ["", "step", "step x", "nothing 3", "ste"])
def test_half_a_word_is_none(line):
    assert pulse.parse(line) is None
    assert pulse.parse("step 3") == ("step", 3)
