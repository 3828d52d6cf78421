"""Cases of how processes end: one of two fails or hangs, or somebody asks them to end."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from faults.killed import PAIR, kill
from faults.runs import (
    ENDLESS,
    PATIENT,
    ROOT,
    SMALLEST,
    acknowledged,
    command,
    configure,
    events,
    losses,
    ranks_of,
    start,
    undisturbed,
    wait_until,
)
from faults.turns import Figures, Turns
from spmdtrain.config.errors import HangError, PeerLostError
from spmdtrain.launch import launch, ranks
from spmdtrain.launch.place import Place

STEP_SECONDS = 5.0  # of silence, or five times the longest step: then it hangs
HANG, LOST = HangError.exit_code, PeerLostError.exit_code
PREEMPTED = 3
# The launcher's patience with those that do not end: to end, to print stacks, to be killed.
ENDED_SECONDS = launch.EXIT_SECONDS + ranks.TERM_SECONDS + 1
HUNG_SECONDS = 60.0


@dataclass(frozen=True)
class Failure:
    """A fault in one process of two, and the exit code of the launcher for it, and a pattern of the
    line that it says.
    """

    fault: str
    rank: int
    code: int
    line: str


FAILURES = [
    Failure("SIGKILL", 1, LOST, "process 1 was ended by SIGKILL"),
    Failure("SIGKILL", 0, LOST, "process 0 was ended by SIGKILL"),
    Failure("coordinator", 0, LOST, "ended (by SIGABRT|with code 8)"),  # jax aborts, or we end it
    Failure("exception", 1, 1, "process 1 ended with code 1"),
    Failure("segfault", 1, LOST, "process 1 was ended by SIGSEGV"),
    Failure("abort", 1, LOST, "process 1 was ended by SIGABRT"),
    Failure("exit 0", 1, LOST, "process 1 ended with code 0 before the run was over"),
    Failure("SIGSTOP", 1, HANG, "the run hangs: "),
    Failure("sleep", 1, HANG, "the run hangs: "),
    Failure("held lock", 1, HANG, "the run hangs: "),
]


def failures(folder: Path, turns: Turns) -> Figures:
    """One process of two fails or hangs in a step; measured is when the launcher has ended, and
    with it the last process. It makes no second attempt here.
    """
    configure(folder, "train.steps=12", "checkpoint.every=0", "mesh.data=2", *SMALLEST)
    seconds: dict[str, float] = {}
    right = 0
    for number in turns:
        failure = FAILURES[number % len(FAILURES)]
        code, said, took = launched(folder, f"{number}", failure.fault, failure.rank)
        name = f"{failure.fault} of process {failure.rank}"
        seconds[name] = round(took, 1)
        limit = HUNG_SECONDS if failure.code == HANG else ENDED_SECONDS
        right += bool(code == failure.code and re.search(failure.line, said) and took <= limit)
    control, said, _ = launched(folder, "control", "none", 0)
    return {
        "ended_as_documented": f"{right} of {turns.taken}",
        "seconds_until_all_are_gone": ", ".join(f"{name} {took}" for name, took in seconds.items()),
        "control": f"without a fault the launcher ends with {control} and says {said or 'nothing'}",
        "passed": right == turns.taken and control == 0 and not said,
    }


def launched(folder: Path, run: str, fault: str, rank: int) -> tuple[int, str, float]:
    """Exit code and lines of a launcher, and the seconds from the fault to its end."""
    program = [sys.executable, "-m", "faults.faulty", fault, str(rank)]
    train = ["train", "run.toml", "--run", run, "--simulate-devices", "1"]
    said: list[str] = []
    here = Path.cwd()
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with (
        mock.patch.object(ranks, "PROGRAM", program),
        mock.patch.object(launch, "CYCLES", 1),
        mock.patch.object(launch, "say", said.append),
        mock.patch.dict(os.environ, paths),
    ):
        os.chdir(folder)
        try:
            code = launch.Launcher(train, Place(), PAIR, STEP_SECONDS).run()
        finally:
            os.chdir(here)
    ended = time.monotonic()
    return code, "; ".join(said), ended - float((folder / "hit").read_text())


def asked_to_end(folder: Path, turns: Turns) -> Figures:
    """SIGTERM in the ways that it may come; then the run goes on to the losses of one that was not
    disturbed.
    """
    ways = [one_of_two, twice, amid_a_save, amid_compiling]
    configure(folder, ENDLESS, "checkpoint.every=3", "mesh.data=2", *SMALLEST)
    kept: list[str] = []
    seconds: dict[str, float] = {}
    for number in turns:
        way = ways[number % len(ways)]
        run = f"{number}"
        (folder / "hit").unlink(missing_ok=True)
        right, took = way(folder, run)
        name = way.__name__.replace("_", " ")
        seconds[name] = round(took, 1)
        before = acknowledged(folder / run)
        goes_on(folder, run)
        reached = acknowledged(folder / run)
        saved = [event["step"] for event in events(folder / run, "saved")]
        got = losses(folder / run)
        _, want = undisturbed(folder, reached, f"undisturbed{number}", processes=PAIR)
        same = bool(want) and all(got.get(step) == want[step] for step in want)
        if right and same and reached > before and len(saved) == len(set(saved)):
            kept.append(name)
    control, _ = undisturbed(folder, 3, "control", processes=PAIR)
    return {
        "as_if_it_had_not_been_asked": f"{len(kept)} of {turns.taken}",
        "seconds_until_all_are_gone": ", ".join(f"{name} {took}" for name, took in seconds.items()),
        "control": f"the undisturbed run ends with {control}",
        "passed": len(kept) == turns.taken and control == 0,
    }


def one_of_two(folder: Path, run: str) -> tuple[bool, float]:
    """One process gets the signal; both take the same last step, and save it."""
    launcher = command(folder, run, launch=("launch", "--local-processes", str(PAIR)))
    wait_until(lambda: acknowledged(folder / run) > 0, launcher, PATIENT)
    asked = time.monotonic()
    kill(ranks_of(launcher)[1], signal.SIGTERM)
    code = launcher.wait()
    took = time.monotonic() - asked
    [preempted] = events(folder / run, "preempted")
    return code == PREEMPTED and preempted["step"] == acknowledged(folder / run), took


def twice(folder: Path, run: str) -> tuple[bool, float]:
    """The second signal comes while the step in flight takes its time: the process ends at once."""
    process = faulty(folder, "slow step", run)
    wait_until(lambda: (folder / "hit").exists(), process, PATIENT)
    process.terminate()
    time.sleep(0.1)
    asked = time.monotonic()
    process.terminate()
    code = process.wait()
    took = time.monotonic() - asked
    return code == 128 + signal.SIGTERM and took < 1, took


def amid_a_save(folder: Path, run: str) -> tuple[bool, float]:
    """The save of step 3 is under way: it is completed, and the last step is saved as well."""
    process = faulty(folder, "slow save", run)
    checkpoints = folder / run / "checkpoints"
    wait_until(lambda: list(checkpoints.glob("3.*tmp*")), process, PATIENT)
    asked = time.monotonic()
    process.terminate()
    code = process.wait()
    took = time.monotonic() - asked
    saved = [event["step"] for event in events(folder / run, "saved")]
    [preempted] = events(folder / run, "preempted")
    right = code == PREEMPTED and saved[0] == 3 and saved[-1] == preempted["step"]
    return right and not list(checkpoints.glob("*tmp*")), took


def amid_compiling(folder: Path, run: str) -> tuple[bool, float]:
    """Before the first step there is nothing to save: the process ends at once."""
    process = faulty(folder, "compile", run)
    wait_until(lambda: (folder / "hit").exists(), process, PATIENT)
    time.sleep(0.3)
    asked = time.monotonic()
    process.terminate()
    code = process.wait()
    took = time.monotonic() - asked
    [ended] = events(folder / run, "ended")
    told = (ended["exit_code"], ended["phase"]) == (code, "compile")
    return code == 128 + signal.SIGTERM and took < 1 and told, took


def faulty(folder: Path, fault: str, run: str) -> subprocess.Popen:
    """`spmdtrain train` on one process of two simulated devices, with a fault of faulty.py."""
    train = ("train", "run.toml", "--run", run, "--simulate-devices", str(PAIR))
    return start(folder, ("-m", "faults.faulty", fault, "0", *train), run)


def goes_on(folder: Path, run: str) -> None:
    """Two processes go on with the run, save once more, and are asked to end."""
    there = acknowledged(folder / run)
    launcher = command(folder, run, launch=("launch", "--local-processes", str(PAIR)))
    wait_until(lambda: acknowledged(folder / run) > there, launcher, PATIENT)
    launcher.terminate()
    launcher.wait()
