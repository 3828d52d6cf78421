"""`make faults`: every case in full. A JSON line for each, and docs/faults.md from such lines.

python -m faults [--times N] [--minutes M] [NAMES ...] >> FILE
python -m faults --write FILE

SIGTERM lets the case that runs end after its turn, with the figures that it has, and no other case
begin.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
COMPILED = tempfile.TemporaryDirectory(prefix="faults-compiled-")  # children read it too
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

from faults.cases import CASES, Case  # noqa: E402
from faults.experiments import EXPERIMENTS  # noqa: E402
from faults.turns import Figures, Turns  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = """# Faults

What can break a run, and how runs survived it. This page is written by `make faults`, which runs
every case of `tests/faults/cases.py` and prints its figures. "6 of 200" means that the case has run
only 6 of the 200 times that it should so far. `control` is what happens when the guard is switched
off, or nothing is broken.

| case | promise | times | measured | control | kept |
|---|---|---|---|---|---|
"""
COST = """
The figures are from a busy machine with two cores, on simulated devices: seconds are upper bounds.
A process that hangs was allowed 5 s a step (`--step-seconds`), in the soak 10 s; the rest of the
time went into printing stacks and ending the processes.

What the guards cost is printed by `make bench-guards`. On the same busy cores, beside a step of
167 ms on two simulated devices: 0.14 ms of the host in each step; 0.8 steps for which a save holds
the loop, of which 0.1 for the fingerprints; 0.2 % of the time for comparing the copies every 100
steps; 4 % more processor time where the step judges spikes itself.

## What is broken, and where

| experiment | cases and tests |
|---|---|
"""
OWN_COLUMNS = ("case", "times", "control", "passed", "seconds")


def row(case: Case, figures: Figures) -> str:
    measured = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in figures.items()
        if name not in OWN_COLUMNS
    ]
    kept = "yes" if figures["passed"] else "no"
    times = figures["times"]
    count = times if times >= case.full else f"{times} of {case.full}"
    cells = [case.name, case.promise, count, "; ".join(measured), figures["control"], kept]
    return f"| {' | '.join(map(str, cells))} |\n"


def write_page(lines: list[str]) -> None:
    """The page of these results; of a case that ran twice, the last."""
    results = {found["case"]: found for found in map(json.loads, lines)}
    rows = [row(case, results[case.name]) for case in CASES if case.name in results]
    proofs = [f"| {what} | {', '.join(found)} |\n" for what, found in EXPERIMENTS.items()]
    PAGE.write_text(HEAD + "".join(rows) + COST + "".join(proofs))


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults")
    parser.add_argument("names", nargs="*", help="of cases; all unless given")
    parser.add_argument("--times", type=int, help="how often, in place of each case's own number")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no turn begins after them")
    parser.add_argument(
        "--write", metavar="FILE", help="runs nothing; writes the page of its lines"
    )
    parsed = parser.parse_args()
    if parsed.write:
        write_page(Path(parsed.write).read_text().splitlines())
        return 0
    ended: list[int] = []
    kept = True
    # Standard output is for the figures: what runs print, children too, goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for case in CASES:
        if ended or (parsed.names and case.name not in parsed.names):
            continue
        turns = Turns(parsed.times or case.full, 60 * parsed.minutes)

        def end(number: int, _: Any, turns: Turns = turns) -> None:
            ended.append(number)
            turns.end()

        signal.signal(signal.SIGTERM, end)
        start = time.monotonic()
        folder = tempfile.mkdtemp(prefix="faults-")
        figures = case.run(Path(folder), turns)
        if figures["passed"]:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"{case.name}: what it left is in {folder}", file=sys.stderr)
        seconds = round(time.monotonic() - start)
        line = {"case": case.name, "times": turns.taken, **figures, "seconds": seconds}
        print(json.dumps(line), file=out, flush=True)
        kept = kept and figures["passed"]
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
