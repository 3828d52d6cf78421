"""What the framework costs: the step time of the training loop against a jitted step written by
hand.

Both train the same GPT from the same values on the same batches, on one CPU device, in turns: a
*round* of some steps of the loop, then one of each other *contender*, and again. The loop is
`loop.train` as users get it (batches made ahead in a thread, metrics one step late, metrics.jsonl,
progress lines, signal handlers); the other rounds run where it would evaluate, and the clock here
is not the loop's own. Checkpoints are left out: one is written, after the last round.

`step` is the loop's compiled step in a bare `for`: step against bare is what XLA makes of the
model, loop against step is what the loop adds. Losses must agree at every step, or the figures
would compare different models.

Beside the time on the wall stands the time on the processor, all threads together: other programs
hardly move it. And page faults: left alone, glibc hands the workspace of a step (75 MB) back to the
kernel and takes it anew each step, or does not, as luck has it. That is worth more than what is
measured here, so `make` tells it to keep what it has.

    make bench-overhead, or
    python benchmarks/overhead.py [--rounds N] [--steps N] [--set model.embed=256] [--json FILE]
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax, which reads both once
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from beside.bare import make_step

from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.identity import identity
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config.errors import UserError
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.run_files import RunFiles
from spmdtrain.config.schema import GPT, AdamW, CheckpointConfig, EvalConfig, RunConfig, TrainConfig
from spmdtrain.data.source import open_data
from spmdtrain.running.compile_step import compile_step, lower_step
from spmdtrain.running.device_batches import batches as device_batches
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.loop import take_steps
from spmdtrain.running.record.step_record import StepRecord
from spmdtrain.running.report.reporter import Reporter
from spmdtrain.running.ride import Ride
from spmdtrain.running.saves import Saves
from spmdtrain.running.watch import Watch
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard

LIMIT = 1.03  # largest ratio loop / bare that we accept
LOSS_TOLERANCE = 1e-4  # relative, float32: sums in another order, over a few hundred steps

CONFIG = RunConfig(
    model=GPT(layers=4, embed=128, heads=4),
    train=TrainConfig(global_batch=8, sequence_length=128, clip=1.0),
    optimizer=AdamW(learning_rate=3e-4, schedule="constant", weight_decay=0.1),
    checkpoint=CheckpointConfig(every=0, keep=1),
)

BARE = ("bare, unrolled", "bare, scanned")
STEP, LOOP = "step", "loop"


# --- rounds ---------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """Since when, or per step of a round."""

    wall: float  # seconds
    cpu: float  # seconds, of all threads
    faults: float

    @staticmethod
    def so_far() -> "Spent":
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Spent(time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_minflt)

    def per_step(self, steps: int) -> "Spent":
        """What was spent on `steps` steps since this was taken."""
        return Spent(
            *((now - then) / steps for now, then in zip(Spent.so_far(), self, strict=True))
        )


class Contender:
    """A step in a bare `for`, its state, and what was seen of it: each round, and the loss of each
    step.
    """

    def __init__(
        self,
        step: Callable,
        state: Any,
        batches: Sequence[Any],
        loss: Callable[[Any], Any] = lambda x: x,
    ):
        self._step, self._state, self._batches, self._loss = step, state, batches, loss
        self.rounds: list[Spent] = []
        self.losses: list[float] = []

    def round(self, steps: int) -> None:
        first, late = len(self.losses), None
        start = Spent.so_far()
        for batch in self._batches[first : first + steps]:
            self._state, result = self._step(self._state, batch)
            if late is not None:
                self.losses.append(float(self._loss(late)))  # one step late, as the loop reads it
            late = result
        self.losses.append(float(self._loss(late)))
        jax.block_until_ready(self._state)
        self.rounds.append(start.per_step(steps))


class Turns:
    """Given to the loop as its `evaluate`: ends its round, lets every contender have one, and
    starts its next.
    """

    def __init__(self, contenders: dict[str, Contender], steps: int):
        self._contenders, self._steps = contenders, steps
        self.rounds: list[Spent] = []
        self.start = Spent.so_far()

    def __call__(self, state: Any) -> dict[str, float]:
        jax.block_until_ready(state)
        self.rounds.append(self.start.per_step(self._steps))
        shift = len(self.rounds) % len(self._contenders)  # nobody always follows the same one
        names = [*self._contenders]
        for name in names[shift:] + names[:shift]:
            self._contenders[name].round(self._steps)
        self.start = Spent.so_far()
        return {"eval_loss": 0.0, "eval_tokens": 1, "eval_split_tokens": 1}


def race(config: RunConfig, rounds: int, steps: int, directory: Path) -> dict[str, Any]:
    """Rounds {contender: [Spent]} and losses {contender: [one per step]}. One more round, not among
    them, warms up.
    """
    train = config.train.model_copy(update={"steps": (rounds + 1) * steps})
    config = config.model_copy(update={"train": train, "eval": EvalConfig(every=steps)})
    config, data = open_data(config)
    setup = shard(config, devices=jax.devices()[:1])
    directory.mkdir(parents=True, exist_ok=True)
    with device_batches(setup, data, 0, 0) as ahead:
        batches = [next(ahead) for _ in range(train.steps)]
    pairs = [(batch["tokens"][0], batch["targets"][0]) for batch in batches]

    state = init_state(setup)
    step, _ = compile_step(setup, lower_step(setup))
    alone = jax.jit(lambda state: jax.tree.map(jnp.copy, state))(state)
    contenders = {
        name: Contender(*make_step(setup.config, state.params, name == BARE[1]), pairs)
        for name in BARE
    } | {STEP: Contender(step, alone, batches, lambda metrics: metrics["loss"])}

    checkpoints = Checkpoints(directory, setup, Retention(config.checkpoint))
    with (
        contextlib.closing(checkpoints),
        Reporter(directory, setup.config, 0) as reporter,
        StepRecord(setup, 0, 0, directory) as record,
        device_batches(setup, data, 0, 0, saw=[record.saw]) as ahead,
        (directory / "log").open("w") as log,
        contextlib.redirect_stdout(log),
        Interrupt(setup.mesh) as interrupt,
    ):
        turns = Turns(contenders, steps)
        kept = identity(setup, data.fingerprint, {})
        saves = Saves(setup, lambda: kept, checkpoints, reporter, 0, 0)
        saves.rides = [Ride(after_step=record.after_step)]
        watch = Watch(setup, 0, turns, saves, reporter, interrupt)
        take_steps(watch, step, state, ahead)

    lines = RunFiles(directory).metrics
    seen = {name: contender.rounds[1:] for name, contender in contenders.items()} | {
        LOOP: turns.rounds[1:]
    }
    losses = {name: contender.losses for name, contender in contenders.items()}
    return {
        "rounds": seen,
        "losses": losses | {LOOP: [line["loss"] for line in lines if "loss" in line]},
    }


# --- figures --------------------------------------------------------------------------------------


def largest_loss_difference(losses: dict[str, list[float]]) -> float:
    """Relative to the loop's, over all contenders and steps."""
    return max(
        abs(other - ours) / abs(ours)
        for name in losses
        for ours, other in zip(losses[LOOP], losses[name], strict=True)
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {
        "fastest": min(values),
        "low": low,
        "median": middle,
        "high": high,
        "slowest": max(values),
    }


def compared(rounds: dict[str, list[Spent]], of: str, to: str) -> dict[str, float]:
    """`of` / `to`: median and quartiles of the ratios round by round; ratios of the medians, of the
    fastest, of cpu.
    """
    ratios = spread([a.wall / b.wall for a, b in zip(rounds[of], rounds[to], strict=True)])
    ours, theirs = ([spent.wall for spent in rounds[name]] for name in (of, to))
    return {
        "ratio": ratios["median"],
        "low": ratios["low"],
        "high": ratios["high"],
        "of_medians": statistics.median(ours) / statistics.median(theirs),
        "of_fastest": min(ours) / min(theirs),
        "of_cpu": statistics.median(
            a.cpu / b.cpu for a, b in zip(rounds[of], rounds[to], strict=True)
        ),
    }


def figures(config: RunConfig, measured: dict[str, Any]) -> dict[str, Any]:
    rounds = measured["rounds"]
    seen = {
        name: spread([spent.wall for spent in spents])
        | {"cpu": statistics.median(spent.cpu for spent in spents)}
        | {"faults": statistics.median(spent.faults for spent in spents)}
        for name, spents in rounds.items()
    }
    bare = min(BARE, key=lambda name: seen[name]["median"])
    return {
        "bare": bare,
        "limit": LIMIT,
        "loop_to_bare": compared(rounds, LOOP, bare),
        "step_to_bare": compared(rounds, STEP, bare),
        "loop_to_step": compared(rounds, LOOP, STEP),
        "seconds": seen,
        "largest_loss_difference": largest_loss_difference(measured["losses"]),
        "rounds": len(rounds[LOOP]),
        "steps": len(measured["losses"][LOOP]),
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        "model": config.model.model_dump(),
        "sequences": config.train.global_batch,
        "sequence_length": config.train.sequence_length,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'ms per step':16}{'median':>9}{'quartiles':>18}{'fastest':>9}{'slowest':>9}"
        f"{'cpu':>9}{'faults':>9}"
    ]
    for name, seen in result["seconds"].items():
        ms = {key: f"{1000 * value:.1f}" for key, value in seen.items()}
        lines.append(
            f"{name:16}{ms['median']:>9}{ms['low'] + ' to ' + ms['high']:>18}"
            f"{ms['fastest']:>9}{ms['slowest']:>9}{ms['cpu']:>9}{seen['faults']:>9.0f}"
        )
    lines += [
        "",
        f"{'ratio':16}{'by round':>9}{'quartiles':>18}{'fastest':>9}{'medians':>9}{'cpu':>9}",
    ]
    for name, key in (
        ("loop / bare", "loop_to_bare"),
        ("step / bare", "step_to_bare"),
        ("loop / step", "loop_to_step"),
    ):
        seen = {of: f"{value:.3f}" for of, value in result[key].items()}
        lines.append(
            f"{name:16}{seen['ratio']:>9}{seen['low'] + ' to ' + seen['high']:>18}"
            f"{seen['of_fastest']:>9}{seen['of_medians']:>9}{seen['of_cpu']:>9}"
        )
    verdict = "within" if result["loop_to_bare"]["ratio"] <= LIMIT else "ABOVE"
    lines += [
        "",
        f"bare is the faster of the two: {result['bare']}; loop / bare is {verdict} {LIMIT}",
        f"losses agree within {result['largest_loss_difference']:.1e} "
        f"over {result['steps']} steps; load {result['load']:.1f} on {result['cores']} cores",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="of each contender (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="in a round (default: %(default)s)")
    add_common_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        config = from_resolved(resolved(CONFIG), parsed.set)
        with tempfile.TemporaryDirectory() as directory:
            measured = race(config, parsed.rounds, parsed.steps, Path(directory))
    except UserError as error:
        sys.exit(str(error))
    result = figures(config, measured)
    assert result["largest_loss_difference"] <= LOSS_TOLERANCE, (
        f"different models: {measured['losses']}"
    )
    publish(table(result), result, parsed.json)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--set` and `--json`, which every benchmark of a training step has."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another size, say model.embed=256",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="writes the figures there as well"
    )


def publish(text: str, result: dict[str, Any], path: Path | None) -> None:
    """Prints the text and the figures; writes the figures to `path` if there is one."""
    print(text)
    print(json.dumps(result))
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
