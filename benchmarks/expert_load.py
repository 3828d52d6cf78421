"""How soon routers spread a skewed corpus evenly, and at what loss: by a bias, a loss, or nothing.

    python benchmarks/expert_load.py [--steps 500] [--seeds 0 1]

A model of two layers with eight experts, of which a token goes through two, learns bytes: three in
four lines are numbers, of eleven symbols, and the others are code of the standard library. Each way
runs in a process of its own.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVEN = 1.5  # of the most loaded expert, over the mean of its layer: what counts as even
WINDOW = 20  # steps whose mean must be even, and of which loss and load are shown at the end

WAYS = {
    "a bias, 0.001 a step": ("model.experts.bias_rate=0.001",),
    "a balance loss, 0.01": ("model.experts.balance=0.01",),
    "nothing": (),
}

RUN = """
[model]
name = "llama"
layers = 2
embed = 32
heads = 2
[model.experts]
count = 8
chosen = 2
ffn = 32
score = "sigmoid"
[train]
steps = {steps}
global_batch = 16
sequence_length = 64
[optimizer]
learning_rate = 3e-3
warmup = 20
[data]
corpus = "text"
path = "{text}"
tokenizer = "bytes"
[checkpoint]
every = 0
"""


def skewed_text() -> str:
    """Returns half a megabyte of lines, three in four of which are numbers."""
    draw = random.Random(0)
    code = Path(random.__file__).read_text(encoding="utf-8").splitlines()
    lines = []
    for number in range(16_000):
        if number % 4:
            lines.append(" ".join(str(draw.randrange(10**6)) for _ in range(4)))
        else:
            lines.append(code[number // 4 % len(code)])
    return "\n".join(lines)


def metrics(text: Path, settings: tuple[str, ...], steps: int, seed: int) -> list[dict]:
    """Returns the lines of metrics.jsonl of one run."""
    with tempfile.TemporaryDirectory() as folder:
        config, run = Path(folder, "run.toml"), Path(folder, "run")
        config.write_text(RUN.format(text=text, steps=steps))
        command = [sys.executable, "-m", "spmdtrain.cli", "train", str(config), "--run", str(run)]
        for setting in (*settings, f"train.seed={seed}"):
            command += ["--set", setting]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "expert_load" in line]


def first_even(loads: list[float]) -> int | None:
    """Returns the first step from which on the mean of `WINDOW` loads is even, None if never."""
    for step in range(len(loads) - WINDOW + 1):
        if statistics.mean(loads[step : step + WINDOW]) <= EVEN:
            return step
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    print(f"| balanced by | seed | even (load <= {EVEN}) from step | load at the end | loss |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "skewed.txt")
        text.write_text(skewed_text(), encoding="utf-8")
        for name, settings in WAYS.items():
            for seed in given.seeds:
                found = metrics(text, settings, given.steps, seed)
                loads = [line["expert_load"] for line in found]
                ends = [
                    statistics.mean(line[key] for line in found[-WINDOW:])
                    for key in ("expert_load", "loss")
                ]
                even = first_even(loads)
                said = "never" if even is None else str(even)
                print(f"| {name} | {seed} | {said} | {ends[0]:.2f} | {ends[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
