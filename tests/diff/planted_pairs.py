"""Pairs of runs, and what `diff` says of them.

    python tests/diff/planted_pairs.py

compares 30 runs with the same run after one change, which must be named first; 30 with the same run
again, which must be identical to the bit; and 30 with the same run in another layout, which must
differ by rounding alone. Runs share what they compile.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  eight simulated devices, before jax is imported

import jax
import numpy as np
from fuzz import programs
from helpers import mesh_of, tiny

from spmdtrain.lab.diff.diff import Compared, diff
from spmdtrain.running import loop
from spmdtrain.running.record import start
from spmdtrain.running.start import compiling

STEPS = 36
SETTINGS = (
    f"train.steps={STEPS}",
    "model.layers=2",
    "model.embed=16",
    "model.heads=2",
    "train.sequence_length=16",
    "eval.every=0",
)
# Settings of A, by name; each is trained once.
BASES = {
    "gpt": (),
    "llama": (
        *("model.positions=rope", "model.norm=rmsnorm", "model.mlp=swiglu", "model.bias=false"),
        *("model.tied=false", "optimizer.schedule=constant"),
    ),
    "dropout": ("model.dropout=0.1", "train.z_loss=1e-4"),
    "bfloat16": ("precision.compute=bfloat16",),
}
FLOAT32 = ("gpt", "llama", "dropout")
CHANGES = (
    *("optimizer.learning_rate=0.01001", "optimizer.learning_rate=0.011", "optimizer.beta1=0.91"),
    *("optimizer.beta2=0.951", "optimizer.epsilon=1e-7", "optimizer.weight_decay=0.11"),
    *("optimizer.warmup=3", "train.clip=0.5", "optimizer.schedule=constant"),
    *("optimizer.final_learning_rate=1e-4", f"train.steps={STEPS + 1}", "train.seed=1"),
    *("model.norm_epsilon=1.1e-5", "model.dropout=0.01", "train.label_smoothing=0.001"),
    *("train.z_loss=1e-5", "precision.compute=bfloat16", "model.positions=rope"),
    *("model.bias=false", "model.mlp=swiglu", "model.tied=false", "model.logit_cap=30"),
    *("model.heads=4", "train.global_batch=8", "train.sequence_length=8", "optimizer.name=lion"),
)
FAULTS = ("code", "machine", "corpus", "layout")  # changes that are no setting
LAYOUTS = (
    ("mesh.data=2",),
    ("mesh.fsdp=4",),
    ("mesh.tensor=2",),
    ("mesh.context=2",),
    ("mesh.pipeline=2", "train.microbatch=4"),
    ("mesh.data=2", "mesh.tensor=2", "train.zero=1"),
    ("mesh.fsdp=2", "mesh.context=2"),
    ("train.microbatch=4",),
    ("train.remat=full", "mesh.data=4"),
    ("mesh.pipeline=2", "mesh.data=2", "train.microbatch=2", "pipeline.schedule=gpipe"),
)


@dataclass(frozen=True)
class Pair:
    """B is A with other settings, or with a fault; `first`: what must be named first."""

    base: str
    settings: tuple[str, ...]
    verdict: str
    first: tuple[str, ...] = ()
    fault: str = ""


def change(text: str) -> Pair:
    """A pair in which one setting has changed."""
    return Pair("gpt", (text,), "differ", (text.partition("=")[0],))


def fault(name: str) -> Pair:
    """A pair in which something else has."""
    first = {"code": "sources of spmdtrain", "machine": "the machine", "corpus": "the corpus"}
    settings = ("mesh.tensor=2",) if name == "layout" else ()
    return Pair("gpt", settings, "differ", (first.get(name, "mesh.tensor"),), name)


def pairs() -> Iterator[Pair]:
    """30 changes, 30 identical pairs and 30 layouts."""
    yield from map(change, CHANGES)
    yield from map(fault, FAULTS)
    for base in FLOAT32:
        yield from (Pair(base, layout, "rounding", names_of(layout)) for layout in LAYOUTS)
    for base in FLOAT32:
        yield from (Pair(base, layout, "identical") for layout in LAYOUTS)


def names_of(layout: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.partition("=")[0] for text in layout)


class Runs:
    """Trains runs below a folder, each A once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._trained: dict[tuple[str, ...], Path] = {}

    def of(self, base: str, settings: tuple[str, ...] = ()) -> Path:
        """The run of a base with other settings."""
        key = (*BASES[base], *settings)
        if key not in self._trained:
            self._trained[key] = self.again(base, settings)
        return self._trained[key]

    def again(self, base: str, settings: tuple[str, ...] = (), planted: str = "") -> Path:
        """The same, trained anew, with a fault in it."""
        directory = self._folder / str(len(list(self._folder.iterdir())))
        settings = (*SETTINGS, *BASES[base], *settings)
        devices = jax.devices()[: mesh_of(settings)]
        with contextlib.redirect_stdout(io.StringIO()), _with(planted) as given:
            loop.run(tiny(*settings), directory, devices=devices, **given)
        return directory

    def compared(self, pair: Pair) -> Compared:
        """What `diff` says of a pair."""
        settings = pair.settings if pair.verdict == "identical" else ()
        a = self.of(pair.base, settings)
        b = self.again(pair.base, pair.settings, pair.fault)
        with contextlib.redirect_stdout(io.StringIO()):
            return diff(a, b, devices=jax.devices()[: mesh_of(settings)])


@contextlib.contextmanager
def _with(planted: str) -> Iterator[dict]:
    """Plants a fault, and yields what a run is given besides its settings."""
    with contextlib.ExitStack() as stack:
        if planted == "code":
            stack.enter_context(patch.object(start, "our_sources", lambda: "0.2 (sources 0)"))
        if planted in ("code", "machine", "layout"):
            stack.enter_context(_broken(at={"machine": 9}.get(planted, 1)))
        yield {"data": _other_tokens} if planted == "corpus" else {}


def _other_tokens(_seed: int, index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 64, 17).astype(np.int32)


@contextlib.contextmanager
def _broken(at: int) -> Iterator[None]:
    """Makes one weight a hundredth larger after step `at`."""
    compile_step = compiling.compile_step

    def broken_step(setup, lowered):
        step, report = compile_step(setup, lowered)

        def broken(state, batch):
            number = int(state.step) + 1
            state, metrics = step(state, batch)
            if number == at:
                path = sorted(state.params)[0]
                moved = {path: state.params[path] * np.float32(1.01)}
                state = replace(state, params=state.params | moved)
            return state, metrics

        return broken, report

    with patch.object(compiling, "compile_step", broken_step):
        yield


def is_right(pair: Pair, found: Compared) -> bool:
    """Whether the verdict is right, and the change named first."""
    named = not pair.first or (bool(found.causes) and found.causes[0].name in pair.first)
    return named and found.verdict == pair.verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first pair")
    parser.add_argument("--pairs", type=int, default=90)
    parsed = parser.parse_args()
    right: dict[str, list[bool]] = {}
    began = time.process_time()
    chosen = list(pairs())[parsed.first : parsed.first + parsed.pairs]
    with tempfile.TemporaryDirectory() as folder, programs.shared():
        runs = Runs(Path(folder))
        for pair in chosen:
            found = runs.compared(pair)
            right.setdefault(pair.verdict, []).append(is_right(pair, found))
            where = found.parting
            verdict = "right" if is_right(pair, found) else "WRONG"
            print(
                f"{verdict} {pair.base} {' '.join(pair.settings)} {pair.fault}: {found.verdict}, "
                f"{[each.name for each in found.causes][:2]}, from {where.first}, "
                f"beyond {where.beyond} {where.in_figure}, {where.times} {where.without}"
            )
            sys.stdout.flush()
    for verdict, each in right.items():
        print(f"{verdict}: {sum(each)} of {len(each)} right")
    print(f"{time.process_time() - began:.0f} s of CPU")


if __name__ == "__main__":
    main()
