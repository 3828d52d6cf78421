"""Examines cases by the thousand: starts workers, outlives them, and says at the end what was
found, with the command that makes each finding again.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz_data.case import Case
from fuzz_data.worker import SECONDS

ROOT = Path(__file__).parents[2]
WORKER = (sys.executable, "-m", "fuzz_data.worker")
CASES_PER_WORKER = 500
PATIENCE = SECONDS + 40.0  # until a worker that says nothing is ended
TRIES = 6  # cases that a finding is made smaller by, at most
SHOWN = 1500  # characters of a finding
Line = dict[str, Any]


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    begun = time.perf_counter()
    if asked.case:
        lines = list(answers(["--case", asked.case]))
    else:
        lines = list(campaign(asked.seed, asked.seed + asked.cases))
    print(summary(lines, time.perf_counter() - begun))
    return 1 if any(line["how"] == "found" for line in lines) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make fuzz-data", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--case", help="one case as JSON, as a finding names it")
    return parser


def campaign(first: int, end: int) -> Iterator[Line]:
    """Yield how each case ends. Prints the first finding of each kind, made smaller."""
    known = set()
    while first < end:
        stop = min(end, first + CASES_PER_WORKER)
        for line in answers([str(first), str(stop)]):
            first = line["case"]["seed"] + 1
            if line["how"] == "found" and line["kind"] not in known:
                known.add(line["kind"])
                print(told(line, smaller(line)), flush=True)
            yield line
        print(f"{first:,} of {end:,}", file=sys.stderr, flush=True)


def answers(arguments: list[str]) -> Iterator[Line]:
    """Yield what a worker says of each case. One that ends the worker, or silences it, is last."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    worker = subprocess.Popen(
        [*WORKER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    said: queue.Queue = queue.Queue()
    threading.Thread(target=_read, args=(worker, said), daemon=True).start()
    case = None
    silent = False
    try:
        while line := said.get(timeout=PATIENCE):
            if "begins" in line:
                case = json.loads(line["begins"])
            else:
                yield line | {"case": case}
                case = None
    except queue.Empty:
        silent = True
    finally:
        worker.kill()
        code = worker.wait()
    if case is not None:
        kind = "hangs, and takes no signal" if silent else f"ends the process with {code}"
        end = {"how": "found", "said": kind, "kind": kind, "seconds": 0.0}
        yield end | {"format": case["format"], "case": case}
    elif silent or code:
        raise RuntimeError(f"a worker ended with {code} before its first case")


def _read(worker: subprocess.Popen, said: queue.Queue) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        said.put(json.loads(line))
    said.put(None)


def smaller(line: Line) -> Case:
    """Return the simplest case that is found wrong in the same way."""
    best = Case(**line["case"])
    tries = TRIES if line["kind"].startswith("hangs") else 0  # each would take its whole time
    for change in _simpler(best):
        if change.get("documents", 0) >= best.documents:
            continue
        candidate = replace(best, **change)
        if candidate == best or tries == TRIES:
            continue
        tries += 1
        if any(each["kind"] == line["kind"] for each in answers(["--case", candidate.spoken()])):
            best = candidate
    return best


def _simpler(case: Case) -> Iterator[dict[str, Any]]:
    """Yield changes that make a case simpler."""
    yield from ({"documents": count} for count in (1, 2, 3, 5) if count < case.documents)
    usual = Case(case.seed, case.format)
    for name in ("files", "huge", "shard_tokens", "chunk", "compression", "tokenizer", "reads"):
        yield {name: getattr(usual, name)}
    for name in ("template", "packing", "shuffle", "length", "fraction", "end_of_text", "out"):
        yield {name: getattr(usual, name)}
    yield {"damage": "none", "target": "input"}


def told(line: Line, small: Case) -> str:
    """Return a finding, and how it is made again."""
    seed = line["case"]["seed"]
    said = line["said"]
    if len(said) > SHOWN:
        said = f"{said[: SHOWN // 3]}\n...\n{said[-SHOWN // 3 * 2 :]}"
    return (
        f"FOUND {line['kind']}\n"
        f"  make fuzz-data FUZZ_ARGS='--seed {seed} --cases 1'\n"
        f"  smaller: --case '{small.spoken()}'\n    " + "\n    ".join(said.splitlines())
    )


def summary(lines: list[Line], seconds: float) -> str:
    """Return the table at the end."""
    formats = sorted({line["format"] for line in lines})
    counts = Counter((line["format"], line["how"]) for line in lines)
    rows = [f"{'':14}{'cases':>8}{'passed':>8}{'refused':>8}{'found':>8}"]
    for name in [*formats, "all"]:
        ends = [
            sum(counts[each, how] for each in (formats if name == "all" else [name]))
            for how in ("passed", "refused", "found")
        ]
        rows.append(f"{name:14}{sum(ends):>8,}" + "".join(f"{count:>8,}" for count in ends))
    slowest = max(lines, key=lambda line: line["seconds"], default=None)
    rows.append(f"{seconds:.0f} s in all")
    if slowest:
        rows[-1] += f", the longest case {slowest['seconds']:.1f} s ({slowest['case']})"
    found = Counter(line["kind"] for line in lines if line["how"] == "found")
    first = {line["kind"]: line["case"]["seed"] for line in reversed(lines)}
    rows += [f"{count:>6}  {kind} (first: seed {first[kind]})" for kind, count in found.items()]
    return "\n".join(rows)
