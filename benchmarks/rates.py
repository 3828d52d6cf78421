"""Does the best learning rate stay where it is as a model grows wider? With muP and without.

    python benchmarks/rates.py --text FILE --write docs/width.md [--only NAME ...] [--seeds 1]

A run is a GPT of two layers on the characters of a text, 120 steps of 16 x 64 tokens at one rate of
a grid whose steps are factors of two. All runs of a seed read the same text, so that their losses,
means of the last 40 steps, differ by less than the noise of one. The best rate of a width is the
lowest point of a parabola through the lowest loss and its two neighbours, over the logarithm of the
rate.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

import spmdtrain as st

START, END = "<!-- the table of rates -->", "<!-- end of the table of rates -->"
WIDTHS = (64, 128, 256)
HEAD_DIM = 16  # fixed: heads grow in number, and their scores do not change
STEPS, LAST = 120, 40
BASE = f"model.mup_base={WIDTHS[0]}"


@dataclass(frozen=True)
class Search:
    """An optimizer with or without muP, and the logarithms of the rates that are tried."""

    name: str
    settings: tuple[str, ...]
    powers: range


SEARCHES = (
    Search("AdamW", ("optimizer.name=adamw",), range(-11, -5)),
    Search("AdamW, muP", ("optimizer.name=adamw", BASE), range(-10, -4)),
    Search("Lion, muP", ("optimizer.name=lion", BASE), range(-11, -5)),
    Search("Muon, muP", ("optimizer.name=muon", BASE), range(-9, -3)),
)

RUN = f"""
[model]
name = "gpt"
layers = 2
head_dim = {HEAD_DIM}
[train]
steps = {STEPS}
global_batch = 16
sequence_length = 64
clip = 1.0
[optimizer]
warmup = 20
schedule = "constant"
[data]
corpus = "text"
path = "{{text}}"
tokenizer = "characters"
validation_fraction = 0.0
[eval]
every = 0
[checkpoint]
every = 0
"""


def last_loss(text: Path, width: int, power: int, settings: Sequence[str], seed: int) -> float:
    """Returns the mean loss of the last steps of a run; infinity if one is not finite."""
    sizes = [f"model.embed={width}", f"model.heads={width // HEAD_DIM}"]
    more = [f"optimizer.learning_rate={2.0**power}", f"train.seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.toml")
        file.write_text(RUN.format(text=text), encoding="utf-8")
        config = st.load(file, [*settings, *sizes, *more])
    config, data = st.open_data(config)
    setup = st.shard(config, devices=jax.devices()[:1])
    state, step = st.init_state(setup), st.make_step(setup)
    losses = []
    with st.batches(setup, data, 0, 0) as batches:
        for _ in range(STEPS):
            state, metrics = step(state, next(batches))
            losses.append(metrics["loss"])
    found = np.mean(jax.device_get(losses[-LAST:]))
    return float(found) if np.isfinite(found) else math.inf


def best_power(powers: Sequence[int], losses: Sequence[float]) -> float | None:
    """Returns the logarithm of the rate with the lowest loss; None at an end of the grid."""
    lowest = min(range(len(losses)), key=losses.__getitem__)
    if lowest in (0, len(losses) - 1):
        return None
    left, middle, right = losses[lowest - 1 : lowest + 2]
    if not math.isfinite(left + right):
        return float(powers[lowest])
    return powers[lowest] + (left - right) / (2 * (left - 2 * middle + right))


def rows(text: Path, search: Search, seeds: range) -> Iterator[str]:
    """Yields the lines of a search: the loss at each rate, and where it is lowest."""
    best = []
    for width in WIDTHS:
        losses = [
            statistics.fmean(last_loss(text, width, power, search.settings, seed) for seed in seeds)
            for power in search.powers
        ]
        best.append(best_power(search.powers, losses))
        figures = [f"**{each:.3f}**" if each == min(losses) else f"{each:.3f}" for each in losses]
        where = "at an end" if best[-1] is None else f"2^{best[-1]:.1f}"
        rates = f"2^{search.powers[0]} to 2^{search.powers[-1]}"
        yield f"| {search.name} | {width} | {rates} | {', '.join(figures)} | {where} |"
    known = [each for each in best if each is not None]
    moved = f"{max(known) - min(known):.1f}" if len(known) == len(best) else "unknown"
    yield f"| {search.name} | moves by | | | {moved} steps of the grid |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="a file of real text, 1 MB")
    parser.add_argument("--write", type=Path, help="the page that gets the table")
    names = [search.name for search in SEARCHES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=1, help="whose mean losses are compared")
    given = parser.parse_args()
    table = [
        "| optimizer | width | rates, each twice the one before | losses | best rate |",
        "|---|---|---|---|---|",
    ]
    for search in SEARCHES:
        if search.name in given.only:
            for line in rows(given.text.resolve(), search, range(given.seeds)):
                table.append(line)
                print(line, flush=True)
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        head, _, rest = page.partition(START)
        tail = rest.partition(END)[2]
        lines = [f"{head}{START}", "", *table, "", f"{END}{tail}"]
        given.write.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
