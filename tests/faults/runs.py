"""Starts runs as programs of their own, waits for them, and reads what they leave behind."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers import tiny

from spmdtrain.config import to_toml

ROOT = Path(__file__).parents[2]
SMALLEST = ("model.layers=1", "train.global_batch=2", "optimizer.schedule=constant")
ENDLESS = "train.steps=100000"  # until it is asked to end
PATIENT = 180.0  # seconds for a run to begin or to go on, on a busy machine


def start(folder: Path, program: Sequence[str], log: str) -> subprocess.Popen:
    """`python PROGRAM` in `folder`; what it prints is in LOG.log."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    with (folder / f"{log}.log").open("a") as out:
        return subprocess.Popen(
            [sys.executable, *program], cwd=folder, env=environment, stdout=out, stderr=out
        )


def configure(folder: Path, *settings: str) -> None:
    """Writes run.toml, the settings that `command` reads."""
    (folder / "run.toml").write_text(to_toml(tiny(*settings)))


def command(folder: Path, run: str, *more: str, launch: Sequence[str] = ()) -> subprocess.Popen:
    """`spmdtrain train`, or `spmdtrain LAUNCH train`, on one simulated device a process."""
    train = ("train", "run.toml", "--run", run, "--simulate-devices", "1", *more)
    return start(folder, ("-m", "spmdtrain.cli", *launch, *train), run)


def undisturbed(
    folder: Path, steps: int, run: str = "undisturbed", *, processes: int = 1
) -> tuple[int, dict[int, float]]:
    """Exit code and losses of the same run where nothing happens; it saves nothing on the way."""
    launch = ("launch", "--local-processes", str(processes)) if processes > 1 else ()
    more = (f"--set=train.steps={steps}", "--set=checkpoint.every=0")
    code = command(folder, run, *more, launch=launch).wait()
    return code, losses(folder / run)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen, seconds: float) -> bool:
    """True if the condition came true before the process ended, and within the seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """The processes that a launcher has started and that have not ended."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    try:
        found = [int(pid) for pid in children.read_text().split()]
    except FileNotFoundError:
        return []
    return [pid for pid in found if is_there(pid)]


def is_there(pid: int) -> bool:
    """False for a process that has ended, whether somebody has asked for its code or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def seconds_until_gone(pids: Sequence[int], since: float, most: float = 120.0) -> float:
    """Seconds from `since` (monotonic) until none of the processes is there; inf: one stays."""
    while time.monotonic() - since < most:
        if not any(is_there(pid) for pid in pids):
            return time.monotonic() - since
        time.sleep(0.01)
    return float("inf")


def lines(path: Path) -> list[dict]:
    """The whole lines of a file that may be written just now."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def events(run: Path, name: str) -> list[dict]:
    return [line for line in lines(run / "events.jsonl") if line["event"] == name]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run / "metrics.jsonl") if "loss" in line}


def acknowledged(run: Path) -> int:
    """The newest step of which the run has said that it is saved."""
    return max((line["step"] for line in events(run, "saved")), default=0)


def spread(seconds: Sequence[float]) -> str:
    """Median and largest of some times."""
    if not seconds:
        return "none"
    middle = sorted(seconds)[len(seconds) // 2]
    return f"{middle:.1f} s in the middle, {max(seconds):.1f} s at most"
