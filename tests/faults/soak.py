"""The soak: two processes under `launch`, to which one thing after the other happens."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from faults.damage import flip_weight
from faults.killed import acknowledged_and_lost, kill
from faults.runs import (
    ENDLESS,
    PATIENT,
    SMALLEST,
    acknowledged,
    command,
    configure,
    events,
    losses,
    ranks_of,
    seconds_until_gone,
    spread,
    undisturbed,
    wait_until,
)
from faults.turns import Figures, Turns
from spmdtrain.config.run_files import newest_step

PROCESSES = 2
WATCH = (
    "launch",
    *("--local-processes", str(PROCESSES)),
    *("--step-seconds", "10"),
    *("--report", "report.json"),
)
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "SIGABRT": signal.SIGABRT,
    "SIGSEGV": signal.SIGSEGV,
    "SIGTERM": signal.SIGTERM,  # to one process: both save, and the launcher ends with 3
    "damage": signal.SIGKILL,  # and the newest checkpoint is damaged before it is read
}


class Launched:
    """A launcher, and the report that it leaves."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.process: subprocess.Popen = command(folder, "soaked", launch=WATCH)
        wait_until(lambda: ranks_of(self.process), self.process, PATIENT)
        self._start = time.monotonic()  # the account begins when the launcher has been imported

    def ended(self) -> tuple[int, dict[str, Any], float]:
        """Exit code, report, and by which share of the time the report's seconds are wrong."""
        code = self.process.wait()
        wall = time.monotonic() - self._start
        report = json.loads((self._folder / "report.json").read_text())
        return code, report, abs(sum(report["seconds"].values()) - wall) / wall


def soak(folder: Path, turns: Turns) -> Figures:
    """One of two processes is killed, stopped, made to crash or asked to end, at random, and
    sometimes the newest checkpoint is damaged before the next attempt reads it.

    A launcher that ends because a process was asked to is started again.
    """
    configure(folder, ENDLESS, "checkpoint.every=20", "mesh.data=2", *SMALLEST)
    draw = random.Random(0)
    run = folder / "soaked"
    launched = Launched(folder)
    endings: list[tuple[int, dict[str, Any], float]] = []
    recoveries: dict[str, list[float]] = {kind: [] for kind in SIGNALS}
    for number in turns:
        kind = list(SIGNALS)[number % len(SIGNALS)]
        if not trains_again(launched.process, run):
            break
        time.sleep(draw.uniform(0, 8))
        ranks = ranks_of(launched.process)
        before = len(events(run, "resumed"))
        hit = time.monotonic()
        kill(draw.choice(ranks), SIGNALS[kind])
        if kind == "damage":
            seconds_until_gone(ranks, hit)
            flip_weight(run / "checkpoints" / str(newest_step(run)))
        if kind == "SIGTERM":
            endings.append(launched.ended())
            launched = Launched(folder)
        if wait_until(
            lambda before=before: len(events(run, "resumed")) > before, launched.process, PATIENT
        ):
            recoveries[kind].append(time.monotonic() - hit)
    trains_again(launched.process, run)
    launched.process.terminate()
    endings.append(launched.ended())
    reached = acknowledged(run)
    control, want = undisturbed(folder, reached, processes=PROCESSES)
    got = losses(run)
    same = all(got.get(step) == want[step] for step in want)
    codes = [code for code, _, _ in endings]
    residual = max(residual for _, _, residual in endings)
    wall = sum(report["wall_seconds"] for _, report, _ in endings)
    trained = sum(report["seconds"]["step"] for _, report, _ in endings)
    recovered = sum(map(len, recoveries.values()))
    quarantined = len(events(run, "quarantined"))
    damaged = len(recoveries["damage"])
    lost = acknowledged_and_lost(run)
    return {
        "recovered": f"{recovered} of {turns.taken}",
        "until_it_goes_on": "; ".join(
            f"{kind} {spread(seconds)}" for kind, seconds in recoveries.items() if seconds
        ),
        "minutes": round(wall / 60, 1),
        "attempts": sum(report["attempts"] for _, report, _ in endings),
        "damaged_checkpoints_set_aside": f"{quarantined} of {damaged}",
        "acknowledged_and_lost_otherwise": max(lost - quarantined, 0),
        "steps": reached,
        "exit_codes": codes,
        "losses_are_those_of_the_undisturbed_run": same,
        "goodput": round(trained / wall, 3),
        "residual": round(residual, 4),
        "control": f"the undisturbed run ends with {control}",
        "passed": recovered == turns.taken
        and set(codes) == {3}
        and control == 0
        and same
        and lost <= quarantined == damaged
        and residual < 0.01,  # noqa: PLR2004
    }


def trains_again(launcher: subprocess.Popen, run: Path) -> bool:
    """Waits until the run has saved once more, with two checkpoints to choose from."""
    there = acknowledged(run)

    def is_safe() -> bool:
        folders = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
        return acknowledged(run) > there and len(folders) > 1

    return wait_until(is_safe, launcher, PATIENT)
