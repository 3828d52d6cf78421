"""What each option of the craft costs in loss: on real text, three seeds, beside its baseline.

    python benchmarks/convergence.py --text FILE --write docs/convergence.md [--only NAME ...]

A run is a GPT of two layers on the bytes of a text, 300 steps of 32 x 64 tokens. The margin of an
option was written down before its first run; an option that misses it stays in the table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
START, END = "<!-- the table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Option:
    """Settings beside those of its baseline, and the share by which its loss may be higher."""

    name: str
    settings: tuple[str, ...]
    margin: float
    baseline: tuple[str, ...] = ()


BFLOAT16 = ("precision.compute=bfloat16",)
DATA = ("mesh.data=4",)  # simulated; four shards are summed
OPTIONS = (
    Option("bfloat16 matmuls", BFLOAT16, 0.005),
    Option("bfloat16 moments", ("optimizer.moment_dtype=bfloat16",), 0.002),
    Option("8-bit moments", ("optimizer.moment_dtype=8bit",), 0.002),
    Option("bfloat16 weights, rounded to nearest", ("precision.params=bfloat16",), 0.002),
    Option(
        "bfloat16 weights, stochastic rounding",
        ("precision.params=bfloat16", "precision.rounding=stochastic"),
        0.002,
    ),
    Option(
        "bfloat16 weights, stochastic rounding, 8-bit moments",
        (
            "precision.params=bfloat16",
            "precision.rounding=stochastic",
            "optimizer.moment_dtype=8bit",
        ),
        0.002,
    ),
    Option("8-bit matmuls", (*BFLOAT16, "precision.matmul=float8"), 0.005, BFLOAT16),
    Option("gradients in int8", (*DATA, "compression.codec=int8"), 0.005, DATA),
    Option("gradients in float8", (*DATA, "compression.codec=float8"), 0.005, DATA),
)

RUN = """
[model]
name = "gpt"
layers = 2
embed = 64
heads = 4
[train]
steps = 300
global_batch = 32
sequence_length = 64
clip = 1.0
[optimizer]
learning_rate = 3e-3
warmup = 30
[data]
corpus = "text"
path = "{text}"
tokenizer = "bytes"
validation_fraction = 0.1
[eval]
every = 300
batches = 64
[checkpoint]
every = 0
"""


def held_out_loss(text: Path, settings: Sequence[str], seed: int) -> float:
    """Returns the loss of the last evaluation of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config, run = Path(folder, "run.toml"), Path(folder, "run")
        config.write_text(RUN.format(text=text))
        command = [sys.executable, "-m", "spmdtrain.cli", "train", str(config), "--run", str(run)]
        if settings[: len(DATA)] == DATA:
            command += ["--simulate-devices", "4"]
        for setting in (*settings, f"train.seed={seed}"):
            command += ["--set", setting]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
        return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def rows(text: Path, options: Sequence[Option]) -> Iterator[str]:
    """Yields the lines of the table; a baseline that several options share runs once."""
    found: dict[tuple[str, ...], list[float]] = {}

    def losses(settings: tuple[str, ...]) -> list[float]:
        if settings not in found:
            found[settings] = [held_out_loss(text, settings, seed) for seed in SEEDS]
        return found[settings]

    yield "| option | settings | loss | baseline | difference | margin | holds |"
    yield "|---|---|---|---|---|---|---|"
    for each in options:
        own, base = losses(each.settings), losses(each.baseline)
        share = statistics.mean(own) / statistics.mean(base) - 1
        said = ", ".join(f"`{one}`" for one in each.settings)
        holds = "yes" if share <= each.margin else "**no**"
        figures = (_spread(own), _spread(base), f"{share:+.2%}", f"{each.margin:.1%}", holds)
        yield " | ".join([f"| {each.name}", said, *figures]) + " |"


def _spread(losses: Sequence[float]) -> str:
    return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a file of real text, 1 MB")
    parser.add_argument("--only", nargs="+", help="names of options")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    given = parser.parse_args()
    options = [each for each in OPTIONS if not given.only or each.name in given.only]
    table = []
    for line in rows(given.text.resolve(), options):
        table.append(line)
        print(line, flush=True)
    if given.write:
        page = given.write.read_text()
        head, _, rest = page.partition(START)
        _, _, tail = rest.partition(END)
        given.write.write_text("\n".join([f"{head}{START}", "", *table, "", f"{END}{tail}"]))


if __name__ == "__main__":
    main()
