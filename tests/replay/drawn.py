"""Replays of drawn runs: settings and layouts of the fuzzer, each replayed to the bit.

    python tests/replay/drawn.py --runs 200

A draw that the trainer refuses, or that diverges, is not counted.
"""

import argparse
import contextlib
import io
import os
import random
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  eight simulated devices, before jax is imported

import jax
from fuzz import programs, runs
from fuzz.campaign import prepare_tokens
from fuzz.draw import Draw, draw, settings_of

from spmdtrain.replay.replay import Replayed, replay


def replayed(drawn: Draw, seed: int, directory: Path) -> Replayed | str:
    """The replay of a step of a drawn run; how the run ended, if it did not finish."""
    run = runs.run(drawn.numbers, drawn.layout, directory)
    if not run.went_through or not run.steps:
        return run.end
    step = random.Random(seed).randint(1, max(run.steps))
    _, count = settings_of(drawn.numbers, drawn.layout)
    with programs.shared(), contextlib.redirect_stdout(io.StringIO()):
        return replay(directory, step, to=max(run.steps), devices=jax.devices()[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=600)
    parsed = parser.parse_args()
    os.chdir(Path(__file__).parents[2])
    prepare_tokens()
    equal = tried = 0
    seed = parsed.first
    began = time.monotonic()
    while tried < parsed.runs and time.monotonic() - began < 60 * parsed.minutes:
        with tempfile.TemporaryDirectory() as folder:
            found = replayed(draw(seed), seed, Path(folder) / "run")
        if isinstance(found, str):
            print(f"{seed:5} {found}")
        else:
            tried += 1
            equal += found.equal
            leaves = sum(of for _, of in found.leaves.values())
            verdict = "equal" if found.equal else f"UNEQUAL {found.first}"
            print(f"{seed:5} steps {found.start + 1} to {found.last}, {leaves} leaves: {verdict}")
        sys.stdout.flush()
        seed += 1
    print(f"{equal} of {tried} equal to the bit, {time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
