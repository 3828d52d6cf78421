"""The wall clock of two processes of which one is slow: in step, and as islands.

    python benchmarks/straggler.py --text FILE [--steps N] [--pairs N] [--slowness S]
                                   [--set KEY=VALUE]

The slow process is stopped (SIGSTOP) for all but 1 / slowness of each `PERIOD`, so it computes and
answers that much slower. Each process trains on one thread. In step, both are one run and take
equal shares. As islands, the slow one takes a share of 1 / (1 + slowness), and they meet through a
folder on this disk every 20 steps. Both ways train on the same number of tokens, in turns. The
seconds are those from the end of the first step to the end of the run, without starting and
compiling.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from convergence import RUN

EVERY = 20
SEQUENCES = 16  # of both, a step
PERIOD = 0.12  # seconds from one stop of the slow process to the next
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
IN_STEP, ISLANDS = "in step", "islands"


def slow_down(process: subprocess.Popen, run: Path, slowness: float) -> None:
    """Stops a process again and again, from the first step of its run to its end."""
    while process.poll() is None and "first_step" not in _times(run):
        time.sleep(PERIOD)
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(PERIOD * (1 - 1 / slowness))
        process.send_signal(signal.SIGCONT)
        time.sleep(PERIOD / slowness)


def in_step(folder: Path) -> list[list[str]]:
    """Returns the arguments of the processes of one run; the last is the slow one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    own = ["--run", str(folder / "run"), "--set", "mesh.data=2"]
    whole = [*own, "--set", f"train.global_batch={SEQUENCES}", "--processes", "2"]
    return [[*whole, "--coordinator", f"localhost:{port}", "--process", str(i)] for i in range(2)]


def islands(folder: Path, slowness: float) -> list[list[str]]:
    """Returns the arguments of two runs that meet; the last is the slow one."""
    slow = max(1, round(SEQUENCES / (1 + slowness)))
    found = []
    for index, batch in enumerate((SEQUENCES - slow, slow)):
        settings = (
            *("islands.count=2", f"islands.index={index}", f"islands.every={EVERY}"),
            *(f"islands.directory={folder / 'meetings'}", f"train.global_batch={batch}"),
        )
        found.append(["--run", str(folder / f"run{index}")])
        for setting in settings:
            found[-1] += ["--set", setting]
    return found


def seconds(config: Path, settings: Sequence[str], commands: list[list[str]], slow: float) -> float:
    """Trains with these processes, and returns the seconds of the one that ends last."""
    program = [sys.executable, "-m", "spmdtrain.cli", "train", str(config)]
    more = [word for setting in settings for word in ("--set", setting)]
    environment = os.environ | {"XLA_FLAGS": ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [*program, *more, *command, "--simulate-devices", "1"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for command in commands
    ]
    runs = [Path(command[command.index("--run") + 1]) for command in commands]
    threading.Thread(target=slow_down, args=(started[-1], runs[-1], slow)).start()
    if any([each.wait() for each in started]):
        sys.exit("a process has failed")
    times = [_times(run) for run in runs]
    return max(each["finished"] - each["first_step"] for each in times)


def _times(run: Path) -> dict[str, float]:
    """Returns the time of the last event of each name."""
    file = run / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {event["event"]: event["time"] for event in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a file of real text, 1 MB")
    parser.add_argument("--steps", type=int, default=200, help=f"a multiple of {EVERY}")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--slowness", type=float, default=3.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    given = parser.parse_args()
    taken: dict[str, list[float]] = {IN_STEP: [], ISLANDS: []}
    for _ in range(given.pairs):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = folder / "run.toml"
            config.write_text(RUN.format(text=given.text.resolve()))
            settings = (f"train.steps={given.steps}", "eval.every=0", *given.settings)
            ways = {IN_STEP: in_step(folder), ISLANDS: islands(folder, given.slowness)}
            for way, commands in ways.items():
                taken[way].append(seconds(config, settings, commands, given.slowness))
                print(f"{way}: {taken[way][-1]:.1f} s", flush=True)
    ratios = [a / b for a, b in zip(taken[IN_STEP], taken[ISLANDS], strict=True)]
    said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"in step over islands: {statistics.median(ratios):.2f} (of {said})")


if __name__ == "__main__":
    main()
