"""What a lost process costs, with and without snapshots in memory, and what the snapshots cost.

    python benchmarks/lost_process.py [--steps N] [--every N] [--set KEY=VALUE] [--only NAME ...]
                                      [--json FILE]

Two processes train under `spmdtrain launch`, and one of them is killed with SIGKILL several times,
five steps before the next checkpoint would be due. "a lost host" kills the launcher as well, which
this program starts again, and its snapshots come back from the other launcher. The account of time
is the launcher's. All runs must end with the same losses.

Of a short run the starts are most, as they are on a busy machine: what a process takes to import,
compile and take its first step is in all rows. What snapshots change is in the columns "again" and
"saving".
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROCESSES = 2
BEFORE_SAVE = 5  # steps between a kill and the next checkpoint
RUN = """
[model]
name = "gpt"
layers = 4
embed = 256
heads = 4
vocab = 256

[train]
global_batch = 8
sequence_length = 128

[mesh]
data = 2

[data]
corpus = "synthetic"
"""
# Kills its process, and its launcher where that is asked, when it hears of the step.
HOOK = """
import os, signal
from pathlib import Path

import jax

KILLS = Path(__file__).with_name("kills")

def kill(event, step, figures):
    if event != "step" or not KILLS.exists():
        return
    kills = KILLS.read_text().split()
    for each in kills:
        process, when, what = each.split(":")
        if (int(process), int(when)) == (jax.process_index(), step):
            KILLS.write_text(" ".join(other for other in kills if other != each))
            if what == "host":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
"""
IN_MEMORY = ("checkpoint.memory_every=1",)
ON_A_PEER = (*IN_MEMORY, "checkpoint.memory_peer=true")


@dataclass(frozen=True)
class Case:
    """A run: its settings, and what is killed ("process", "host" or nothing)."""

    name: str
    settings: tuple[str, ...] = ()
    kills: str = ""

    @property
    def hosts(self) -> int:
        """The launchers: two if another host keeps copies, otherwise one for all processes."""
        return PROCESSES if self.settings == ON_A_PEER else 1


CASES = (
    Case("no kill, on disk"),
    Case("no kill, in memory", IN_MEMORY),
    Case("no kill, on the next host", ON_A_PEER),
    Case("a lost process, on disk", (), "process"),
    Case("a lost process, in memory", IN_MEMORY, "process"),
    Case("a lost host, on the next host", ON_A_PEER, "host"),
)


@dataclass
class Measured:
    """The account of a run, and the steps that it took again."""

    report: dict[str, Any]
    again: int
    step: float  # seconds, the median
    snapshot: float | None  # seconds, the median
    bytes: int | None
    losses: dict[int, float]


def kills_of(case: Case, steps: int, every: int) -> str:
    """Returns the kills as the hook reads them, one before each checkpoint."""
    if not case.kills:
        return ""
    at = range(every - BEFORE_SAVE, steps, every)
    # The first host's launcher keeps the account of time.
    who = [1 if case.kills == "host" else number % PROCESSES for number in range(len(at))]
    return " ".join(f"{process}:{step}:{case.kills}" for process, step in zip(who, at, strict=True))


def run(case: Case, folder: Path, steps: int, every: int, settings: list[str]) -> Measured:
    """Trains to the end, whatever is killed."""
    folder.mkdir()
    own = f'[own]\nhooks = ["{folder}/kills.py:kill"]\n'
    (folder / "run.toml").write_text(RUN + own)
    (folder / "kills.py").write_text(HOOK)
    kills = kills_of(case, steps, every)
    (folder / "kills").write_text(kills)
    asked = (f"train.steps={steps}", f"checkpoint.every={every}", *case.settings, *settings)
    train = ["train", "run.toml", "--run", "run", "--simulate-devices", "1"]
    train += [word for setting in asked for word in ("--set", setting)]
    with socket.socket() as free:
        free.bind(("", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"

    def launcher(host: int) -> subprocess.Popen:
        place = {"SPMDTRAIN_HOSTS": str(case.hosts), "SPMDTRAIN_HOST": str(host)}
        place |= {"SPMDTRAIN_COORDINATOR": coordinator}
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "spmdtrain.cli", "launch", "--report", f"{host}.json"]
        command += ["--local-processes", str(PROCESSES // case.hosts), *train]
        with (folder / f"{host}.log").open("a") as log:
            return subprocess.Popen(
                command,
                cwd=folder,
                env=environment | (place if case.hosts > 1 else {}),
                stdout=log,
                stderr=log,
            )

    launchers = [launcher(host) for host in range(case.hosts)]
    while any(each.poll() is None for each in launchers):
        for host, each in enumerate(launchers):
            if (each.poll() or 0) < 0:
                launchers[host] = launcher(host)
        time.sleep(0.2)
    if codes := [each.returncode for each in launchers if each.returncode]:
        raise SystemExit(f"{case.name}: a launcher ended with {codes[0]}, see {folder}")
    return measured(folder, kills)


def measured(folder: Path, kills: str) -> Measured:
    """Reads what a run has left that was killed so."""
    events = lines(folder / "run" / "events.jsonl")
    figures = [each for each in lines(folder / "run" / "metrics.jsonl") if "loss" in each]
    snapshots = [each for each in events if each["event"] == "snapshot"][1:]
    seconds = statistics.median(each["seconds"] for each in snapshots) if snapshots else None
    return Measured(
        report=json.loads((folder / "0.json").read_text()),
        again=steps_again(events, kills),
        step=statistics.median(each["step_seconds"] for each in figures[1:]),
        snapshot=seconds,
        bytes=snapshots[0]["bytes"] if snapshots else None,
        losses={each["step"]: each["loss"] for each in figures},
    )


def steps_again(events: list[dict[str, Any]], kills: str) -> int:
    """Returns how many steps were taken more than once: each start after a kill says from where."""
    killed_at = [int(each.split(":")[1]) for each in kills.split()]
    starts = [each["step"] for each in events if each["event"] in ("started", "resumed")][1:]
    return sum(killed - start for killed, start in zip(killed_at, starts, strict=True))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def row(case: Case, found: Measured, kills: int) -> str:
    """Returns a row of the table."""
    spent = found.report["seconds"]
    copy = ""
    if found.snapshot is not None and found.bytes is not None:
        copy = f"{1000 * found.snapshot:.0f} ms for {found.bytes / 1e6:.0f} MB"
    cells = (
        case.name,
        str(kills),
        str(found.again),
        *(f"{spent[what]:.0f}" for what in ("repeated", "save", "step")),
        f"{found.report['wall_seconds']:.0f}",
        f"{100 * found.report['goodput']:.0f} %",
        f"{1000 * found.step:.0f} ms",
        copy,
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| run | kills | steps again | again, s | saving, s | training, s | all, s | goodput | a step "
    "| a copy |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--every", type=int, default=30, help="steps between checkpoints")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose names have this")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    cases = [
        case for case in CASES if not parsed.only or any(each in case.name for each in parsed.only)
    ]
    print(*HEAD, sep="\n", flush=True)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            place = Path(folder) / str(number)
            found = run(case, place, parsed.steps, parsed.every, parsed.set)
            results[case.name] = found
            kills = len(kills_of(case, parsed.steps, parsed.every).split())
            print(row(case, found, kills), flush=True)
    first = next(iter(results.values())).losses
    if any(each.losses != first for each in results.values()):
        raise SystemExit("the losses of the runs differ")
    print(f"\nthe losses of all {len(results)} runs are the same", flush=True)
    if parsed.json:
        parsed.json.write_text(json.dumps({name: vars(each) for name, each in results.items()}))


if __name__ == "__main__":
    main()
