"""Replays of drawn runs: settings and layouts of the fuzzer, each replayed to the bit.

    python tests/replay/drawn.py --runs 200 [--out FILE]

A draw that the trainer refuses, or that diverges, is not counted. FILE gets a JSON line for each
draw, and one before it, which stays the last if XLA ends the process. Draws that it already holds
are not run again.
"""

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  eight simulated devices, before jax is imported

import jax
from fuzz import programs, runs
from fuzz.campaign import prepare_tokens
from fuzz.draw import LAYOUTS_PER_NUMBERS, SEEDS_PER_NUMBERS, Draw, draw, settings_of

from spmdtrain.lab.replay.replay import Replayed, replay

Line = dict[str, Any]


def replayed(drawn: Draw, seed: int, directory: Path) -> Replayed | str:
    """The replay of a step of a drawn run; how the run ended, if it did not finish."""
    run = runs.run(drawn.numbers, drawn.layout, directory)
    if not run.went_through or not run.steps:
        return run.end
    step = random.Random(seed).randint(1, max(run.steps))
    _, count = settings_of(drawn.numbers, drawn.layout)
    with programs.shared(), contextlib.redirect_stdout(io.StringIO()):
        return replay(directory, step, to=max(run.steps), devices=jax.devices()[:count])


def line_of(seed: int) -> Line:
    """The verdict on the draw of a seed, as JSON values."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = replayed(draw(seed), seed, Path(folder) / "run")
    line: Line = {"seed": seed, "cpu_seconds": round(time.process_time() - start, 1)}
    if isinstance(found, str):
        return line | {"end": found}
    return line | {
        "end": "replayed",
        "steps": [found.start + 1, found.last],
        "leaves": sum(of for _, of in found.leaves.values()),
        "equal": found.equal,
        "first": str(found.first or ""),
    }


def seeds_from(first: int) -> Iterator[int]:
    """Seeds in an order in which those of one layout follow each other, and share its programs.

    What was compiled for the settings before is forgotten, or it would fill the memory.
    """
    group = first // SEEDS_PER_NUMBERS
    while True:
        for layout in range(LAYOUTS_PER_NUMBERS):
            for turn in range(layout, SEEDS_PER_NUMBERS, LAYOUTS_PER_NUMBERS):
                if (seed := group * SEEDS_PER_NUMBERS + turn) >= first:
                    yield seed
            programs.forget()
            jax.clear_caches()
        group += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    out = parsed.out.absolute() if parsed.out else None
    os.chdir(Path(__file__).parents[2])
    prepare_tokens()
    held = out.read_text(encoding="utf-8").splitlines() if out and out.exists() else []
    lines = {line["seed"]: line for line in map(json.loads, held)}
    counted = [line for line in lines.values() if line["end"] == "replayed"]
    began = time.monotonic()
    for seed in seeds_from(parsed.first):
        if len(counted) >= parsed.runs or time.monotonic() - began > 60 * parsed.minutes:
            break
        if seed in lines:
            continue
        keep(out, {"seed": seed, "cpu_seconds": 0.0, "end": "died"})
        line = line_of(seed)
        counted += [line] if line["end"] == "replayed" else []
        print(told(line), flush=True)
        keep(out, line)
    equal = sum(line["equal"] for line in counted)
    print(f"{equal} of {len(counted)} equal to the bit, {time.process_time():.0f} s of CPU")


def keep(out: Path | None, line: Line) -> None:
    """Adds a line to the file of the campaign."""
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def told(line: Line) -> str:
    """A draw in a line."""
    spent = f"{line['seed']:5} {line['cpu_seconds']:5} s"
    if line["end"] != "replayed":
        return f"{spent} {line['end']}"
    first, last = line["steps"]
    verdict = "equal" if line["equal"] else f"UNEQUAL {line['first']}"
    return f"{spent} steps {first} to {last}, {line['leaves']} leaves: {verdict}"


if __name__ == "__main__":
    main()
