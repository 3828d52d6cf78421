"""Draws by the thousand: starts workers, outlives them, writes a line per draw, and says at the
end what was found.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.draw import SEEDS_PER_NUMBERS, TOKEN_FILE, TOKENS_OF, Draw
from fuzz.kinds import kind_of_end
from fuzz.shrink import shrunk, spoken

ROOT = Path(__file__).parents[2]
WORKER = (sys.executable, "-m", "fuzz.worker")
DRAWS_PER_WORKER = 48  # it has grown to a few GB by then
PATIENCE = 1800.0  # seconds that one draw may take on a busy machine, shrinking left out
Line = dict[str, Any]


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    os.chdir(ROOT)
    prepare_tokens()
    until = time.time() + 60 * asked.minutes if asked.minutes else float("inf")
    lines: list[Line] = []
    with _file(asked.out) as out:
        for line in campaign(asked.seed, asked.seed + asked.draws, until, asked.shrink):
            lines.append(line)
            print(told(line), flush=True)
            out.write(json.dumps(line) + "\n")
            out.flush()
    print(summary(lines))
    return 1 if any(line["findings"] for line in lines) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--minutes", type=float, help="no draw begins later")
    parser.add_argument("--out", type=Path, help="a JSON line per draw (default: none is kept)")
    parser.add_argument(
        "--shrink",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="for each new kind of finding",
    )
    return parser


def _file(path: Path | None):
    if path is None:
        return open(os.devnull, "w")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a")


def prepare_tokens() -> None:
    """The token file that draws of data.corpus=tokens read, once."""
    if Path(TOKEN_FILE).with_suffix(".json").exists():
        return
    command = [
        sys.executable,
        "-m",
        "spmdtrain.cli",
        "data",
        "prepare",
        *TOKENS_OF,
        "--out",
        TOKEN_FILE[: -len(".bin")],
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def campaign(seed: int, end: int, until: float, shrink_seconds: float):
    """The line of each draw from `seed` to before `end`, as soon as it is there."""
    known: set[str] = set()
    while seed < end and time.time() < until:
        stop = min(end, (seed // SEEDS_PER_NUMBERS) * SEEDS_PER_NUMBERS + DRAWS_PER_WORKER)
        arguments = [
            "--seeds",
            str(seed),
            str(stop),
            "--until",
            str(until),
            "--shrink",
            str(shrink_seconds),
        ]
        arguments += ["--known", *sorted(known)]
        begun = None
        died = False
        for line in answers([*WORKER, *arguments], PATIENCE + 8 * shrink_seconds):
            if "begins" in line:
                begun = line["begins"]["seed"]
                continue
            if line.get("died"):
                died = True
                line = of_the_dead(line, shrink_seconds, known)
            known |= {kind for kind, _ in line["findings"]}
            yield line
        if begun is None and time.time() < until:
            raise RuntimeError("a worker ended before its first draw; its words are above")
        seed = begun + 1 if died else stop  # it may have left out the last ones


def answers(command: list[str], patience: float):
    """What a worker says, line by line. If it dies, or is silent for too long, the draw it was
    at comes last, with the reason in `died`.
    """
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            begun, died = None, ""
            for line in _lines(worker, patience):
                died = line.get("silent", "")
                if not died:
                    begun = line.get("begins")
                    yield line
            code = worker.wait() if not died else 0
        finally:  # also where nobody asks any more
            worker.kill()
            worker.wait()
        if code:
            died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        errors.seek(0)
        words = errors.read()
        if died and begun:
            yield begun | {"died": kind_of_end(died, words), "stderr": words[-4000:]}
        elif died:
            sys.stderr.write(words[-4000:])


def _lines(worker: subprocess.Popen, patience: float):
    """As they come; `silent` and no more where none comes for `patience` seconds."""
    said: queue.Queue = queue.Queue()
    threading.Thread(target=_read, args=(worker, said), daemon=True).start()
    try:
        while (line := said.get(timeout=patience)) is not None:
            yield line
    except queue.Empty:
        yield {"silent": f"silent for {patience:.0f} s"}


def _read(worker: subprocess.Popen, said: queue.Queue) -> None:
    for line in worker.stdout:
        said.put(json.loads(line))
    said.put(None)


def of_the_dead(line: Line, seconds: float, known: set[str]) -> Line:
    """The line of a draw that ended its worker: a finding, made small by workers of its own."""
    kind = line.pop("died")
    stderr = line.pop("stderr")
    small = {}
    draw = Draw(**line)
    if kind not in known:
        smaller = shrunk(draw, partial(dies, kind=kind), seconds)
        small[kind] = smaller.plain() | {"spoken": spoken(smaller)}
    more = {"outcome": "found", "refused": [], "excused": 0, "seconds": None, "cpu_seconds": None}
    return draw.plain() | more | {"findings": [[kind, stderr]], "shrunk": small}


def dies(draw: Draw, kind: str) -> bool:
    command = [*WORKER, "--draw", json.dumps(draw.plain())]
    return any(line.get("died") == kind for line in answers(command, PATIENCE))


def told(line: Line) -> str:
    """A draw in a line, or in as many as its findings take."""
    took = f"{line['seconds']:5.0f} s" if line["seconds"] is not None else "       "
    lines = [f"seed {line['seed']:<7} {line['end']:<8} {took}  {line['outcome']}"]
    if line["outcome"] == "refused":
        lines[0] += f": {line['refused'][-1]}"
    for kind, said in line["findings"]:
        lines.append(f"  FOUND {kind}")
        if kind in line["shrunk"]:
            lines += [f"    {part}" for part in shortened(str(said)).splitlines()]
            lines += [f"  smaller: {part}" for part in line["shrunk"][kind]["spoken"].splitlines()]
    return "\n".join(lines)


def shortened(text: str) -> str:
    return text if len(text) < 2400 else f"{text[:800]}\n...\n{text[-1500:]}"


def summary(lines: list[Line]) -> str:
    """The table at the end."""
    outcomes = Counter(line["outcome"] for line in lines)
    refused = Counter(kind for line in lines for kind in line["refused"])
    found = Counter(kind for line in lines for kind, _ in line["findings"])
    first = {kind: line["seed"] for line in reversed(lines) for kind, _ in line["findings"]}
    seconds = [line["cpu_seconds"] for line in lines if line["cpu_seconds"] is not None]
    each = sum(seconds) / max(len(seconds), 1)
    excused = sum(line["excused"] > 0 for line in lines)
    rows = ["", f"draws      {len(lines):>6}   {each:.1f} s of CPU each, shrinking left out"]
    rows += [f"{name:<10} {outcomes[name]:>6}" for name in ("trained", "refused", "found")]
    rows += [f"excused    {excused:>6}   trained, and rounding alone moves such a run as far"]
    rows += ["", "refusals"]
    rows += [f"{count:>6}   {kind}" for kind, count in refused.most_common()]
    rows += ["", "findings"]
    rows += [
        f"{count:>6}   {kind} (first: seed {first[kind]})" for kind, count in found.most_common()
    ]
    return "\n".join(rows)
