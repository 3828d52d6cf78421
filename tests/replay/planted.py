"""Runs whose step 44 stands out for a planted cause, and what `explain` says of them.

    python tests/replay/planted.py --cases 60

plants data, rate, precision and machine in turn, each with other numbers, and counts the right
answers. Runs share what they compile.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  eight simulated devices, before jax is imported

import jax
import numpy as np
from fuzz import programs
from helpers import tiny

from spmdtrain.config.errors import DivergedError
from spmdtrain.lab.replay.explain import Explained, explain
from spmdtrain.running import loop
from spmdtrain.running.start import compiling
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard

CAUSES = ("data", "rate", "precision", "machine")
BATCH, BAD, SAVED, STEPS = 16, 44, 40, 46
USED, RARE = 16, 63  # ids below this make samples; this one is in one bad sample only
LENGTH = 16
SETTINGS = (
    f"train.global_batch={BATCH}",
    f"train.sequence_length={LENGTH}",
    "model.layers=1",
    "model.embed=16",
    "model.heads=2",
    "model.tied=false",
    "optimizer.schedule=constant",
    "optimizer.learning_rate=2e-2",
    "checkpoint.every=10",
    "checkpoint.keep=9",
)


def tokens_of(draw: int, cause: str):
    """Samples that count up from a random id, a tenth of them at random; some of step `BAD` bad."""
    first = (BAD - 1) * BATCH
    chosen = np.random.default_rng(draw).choice(BATCH, 5, replace=False) + first

    def tokens(_seed: int, index: int) -> np.ndarray:
        random = np.random.default_rng([draw, index])
        ids = (random.integers(USED) + np.arange(LENGTH + 1)) % USED
        noise = random.random(LENGTH + 1) < 0.1
        ids = np.where(noise, random.integers(0, USED, LENGTH + 1), ids)
        if cause == "data" and index in chosen:
            ids = random.integers(0, RARE, LENGTH + 1)
        if cause == "precision" and index == chosen[0]:
            ids[int(random.integers(1, LENGTH))] = RARE
        return ids.astype(np.int32)

    return tokens


def planted(directory: Path, draw: int, cause: str) -> dict:
    """Trains a run with the cause in it, and returns what `explain` needs beside its directory."""
    data = tokens_of(draw, cause)
    devices = jax.devices()[:1]
    settings = (*SETTINGS, "precision.compute=float16") if cause == "precision" else SETTINGS

    def train(steps: int, *more: str, **given) -> None:
        config = tiny(*settings, f"train.steps={steps}", *more)
        loop.run(config, directory, devices=devices, data=data, **given)

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        given = {}
        if cause == "precision":
            given["state"] = _with_a_huge_weight(settings)
        if cause == "machine":
            stack.enter_context(_flipping(draw))
        if cause == "rate":
            train(SAVED)
            train(STEPS, f"optimizer.learning_rate={0.02 * (20 + 5 * (draw % 5))}")
        else:
            stack.enter_context(contextlib.suppress(DivergedError))  # beyond float16 all is NaN
            train(STEPS, **given)
    return {"devices": devices, "seams": {"data": data}}


def _with_a_huge_weight(settings: tuple[str, ...]):
    """A first state in which the embedding of `RARE` is beyond float16, and not beyond float32."""
    setup = shard(tiny(*settings, f"train.steps={STEPS}"), devices=jax.devices()[:1])
    state = init_state(setup)
    path = next(path for path, x in state.params.items() if x.shape[0] == 64 and x.ndim == 2)
    table = np.array(state.params[path])
    table[RARE] = 1e6
    moved = jax.device_put(table, state.params[path].sharding)
    return replace(state, params=state.params | {path: moved})


@contextlib.contextmanager
def _flipping(draw: int):
    """Flips a high bit of one weight of the second layer's matmul after step `BAD` - 1."""
    compile_step = compiling.compile_step
    random = np.random.default_rng(draw)

    def broken_step(setup, lowered):
        step, report = compile_step(setup, lowered)

        def broken(state, batch):
            at = int(state.step)
            state, metrics = step(state, batch)
            if at == BAD - 2:
                path = str(random.choice(sorted(state.params)))
                bits = np.array(state.params[path]).view(np.uint32)
                bits.flat[random.integers(bits.size)] ^= np.uint32(1 << random.integers(18, 31))
                x = jax.device_put(bits.view(np.float32), state.params[path].sharding)
                state = replace(state, params=state.params | {path: x})
            return state, metrics

        return broken, report

    with patch.object(compiling, "compile_step", broken_step):
        yield


def explained(directory: Path, draw: int, cause: str) -> Explained:
    """What `explain` says of a run with this cause."""
    given = planted(directory, draw, cause)
    with contextlib.redirect_stdout(io.StringIO()):
        return explain(directory, BAD, **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the first draw")
    parsed = parser.parse_args()
    right = 0
    start = time.process_time()
    with programs.shared():
        for case in range(parsed.cases):
            cause = CAUSES[case % len(CAUSES)]
            draw = parsed.first + case // len(CAUSES)
            before = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                found = explained(Path(folder) / "run", draw, cause)
            right += found.cause == cause
            verdict = "right" if found.cause == cause else "WRONG"
            spent = time.process_time() - before
            said = f"{found.cause:12} {verdict} {found.seen} {found.without}"
            print(f"{draw:3} {spent:5.1f} s {cause:10} {said}")
            sys.stdout.flush()
    print(f"{right} of {parsed.cases} right, {time.process_time() - start:.0f} s of CPU")


if __name__ == "__main__":
    main()
