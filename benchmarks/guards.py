"""What the guards cost: time of the host in each step, of the devices, and for which a save holds
the loop.

A run as users get it (`loop.run`) trains a GPT on simulated devices that hold copies of each
other's weights, saves, and compares the copies. Every call of a guard is timed where the loop makes
it, and stands beside the time of a step in the same run. What the step itself does to judge spikes
is the ratio of two compiled steps that take turns, one that judges and one that does not.

All in one process: there the agreement about signals has nobody to ask, and costs less than among
several, and nothing searches for a slow process.

    make bench-guards, or
    python benchmarks/guards.py [--steps N] [--rounds N] [--set model.embed=256] [--json FILE]
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax, which reads all three once
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"]
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
from overhead import Spent, add_common_arguments, publish

from spmdtrain.checkpoints import checkpoints
from spmdtrain.config.errors import UserError
from spmdtrain.config.load import from_resolved, resolved
from spmdtrain.config.schema import (
    GPT,
    AdamW,
    CheckpointConfig,
    GuardConfig,
    MeshConfig,
    RunConfig,
    TrainConfig,
)
from spmdtrain.data.source import open_data
from spmdtrain.processes import pulse
from spmdtrain.running import loop
from spmdtrain.running.compile_step import compile_step, lower_step
from spmdtrain.running.device_batches import batches as device_batches
from spmdtrain.running.guards.guard import Guard
from spmdtrain.running.guards.interrupt import Interrupt
from spmdtrain.running.guards.replicas import ReplicaCheck
from spmdtrain.running.record.step_record import StepRecord
from spmdtrain.running.saves import Saves
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard

DEVICES = 2
LIMIT_MS = 1.0  # of the host, in each step
EVERY = 100  # steps between two comparisons of the copies, as docs/checkpoints.md has it

CONFIG = RunConfig(
    model=GPT(layers=4, embed=128, heads=4),
    train=TrainConfig(global_batch=8, sequence_length=128, clip=1.0),
    optimizer=AdamW(learning_rate=3e-4, schedule="constant", weight_decay=0.1),
    mesh=MeshConfig(data=DEVICES),
    checkpoint=CheckpointConfig(every=10, keep=2),
    guard=GuardConfig(policy="rollback", replica_check=10),
)

# What the loop calls in each step, and at each save: (where it lives, its name).
IN_EACH_STEP = {
    "judging the figures": (Guard, "check"),
    "signals": (Interrupt, "agreed"),
    "complete saves": (Saves, "announce"),
    "word to the launcher": (pulse, "tell"),
    "record of a step": (StepRecord, "after_step"),
}
# In the thread that reads ahead. What counts is its processor time: by the wall it mostly waits for
# the cores, on which the step runs.
AHEAD = {"hash of the tokens": (StepRecord, "_hash")}
AT_A_SAVE = {
    "is it finite": (Guard, "check_state"),
    "are the copies equal": (ReplicaCheck, "before_save"),
    "fingerprints": (checkpoints, "fingerprints"),
    "all of saving": (Saves, "save"),
}


@contextmanager
def timed(
    places: dict[str, tuple[Any, str]], clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, list[float]]]:
    """Inside, every call at these places adds its seconds to the list of its name."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def watched(name: str, call: Callable) -> Callable:
        @functools.wraps(call)
        def wrapper(*given: Any, **named: Any) -> Any:
            start = clock()
            try:
                return call(*given, **named)
            finally:
                seconds[name].append(clock() - start)

        return wrapper

    with ExitStack() as held:
        for name, (owner, attribute) in places.items():
            call = getattr(owner, attribute)
            held.enter_context(mock.patch.object(owner, attribute, watched(name, call)))
        yield seconds


def of_a_run(config: RunConfig, steps: int, directory: Path) -> dict[str, Any]:
    """Seconds of a step, and of each guard: in each step, and at each save but the first."""
    train = config.train.model_copy(update={"steps": steps})
    config = config.model_copy(update={"train": train})
    directory.mkdir(parents=True, exist_ok=True)
    with (
        timed(IN_EACH_STEP | AT_A_SAVE) as seconds,
        timed(AHEAD, time.thread_time) as ahead,
        (directory / "log").open("w") as log,
        redirect_stdout(log),
    ):
        outcome = loop.run(config, directory / "run", devices=jax.devices()[:DEVICES])
    assert outcome.status == "finished" and outcome.step_seconds is not None
    return {
        "step": outcome.step_seconds,
        "in_each_step": {name: sum(seconds[name]) / steps for name in IN_EACH_STEP},
        "ahead": {name: sum(ahead[name]) / steps for name in AHEAD},
        "at_a_save": {name: statistics.median(seconds[name][1:]) for name in AT_A_SAVE},
    }


def of_the_devices(config: RunConfig, rounds: int, steps: int) -> dict[str, float]:
    """A step that judges itself to one that does not: medians over the rounds, on the wall and on
    the processors, and the ratio of the fastest.
    """
    config, data = open_data(config)
    contenders = []
    for policy in ("rollback", "abort"):
        guard = config.guard.model_copy(update={"policy": policy})
        setup = shard(config.model_copy(update={"guard": guard}), devices=jax.devices()[:DEVICES])
        step, _ = compile_step(setup, lower_step(setup))
        contenders.append([step, init_state(setup)])
    with device_batches(setup, data, 0, 0) as ahead:
        batches = [next(ahead) for _ in range(steps)]

    def round_of(contender: list) -> Spent:
        step, state = contender
        start = Spent.so_far()
        for batch in batches:
            state, _ = step(state, batch)
            jax.block_until_ready(state)
        contender[1] = state
        return start.per_step(steps)

    judging, plain = [], []
    for number in range(rounds + 1):
        if number % 2:
            judging.append(round_of(contenders[0]))
        plain.append(round_of(contenders[1]))
        if not number % 2:
            judging.append(round_of(contenders[0]))
    pairs = list(zip(judging, plain, strict=True))[1:]  # the first round warms up
    return {
        "wall": statistics.median(a.wall / b.wall for a, b in pairs),
        "cpu": statistics.median(a.cpu / b.cpu for a, b in pairs),
        "fastest": min(a.wall for a, _ in pairs) / min(b.wall for _, b in pairs),
    }


def figures(run: dict[str, Any], judging: dict[str, float]) -> dict[str, Any]:
    saves = run["at_a_save"]
    step = run["step"]
    host_ms = 1000 * sum(run["in_each_step"].values())
    held = saves["is it finite"] + saves["are the copies equal"] + saves["all of saving"]
    return {
        "step_ms": 1000 * step,
        "host_ms": host_ms,
        "limit_ms": LIMIT_MS,
        "host_us": {name: 1e6 * seconds for name, seconds in run["in_each_step"].items()},
        "record_share": (run["in_each_step"]["record of a step"] + sum(run["ahead"].values()))
        / step,
        "judging_ratio": judging,
        "save_ms": {name: 1000 * seconds for name, seconds in saves.items()},
        "save_in_steps": held / step,
        "fingerprints_in_steps": saves["fingerprints"] / step,
        "copies_share": saves["are the copies equal"] / (EVERY * step),
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }


def table(found: dict[str, Any]) -> str:
    judging = found["judging_ratio"]
    rows = [f"a step takes {found['step_ms']:.1f} ms", "", f"{'host, in each step':28}{'us':>10}"]
    rows += [f"{name:28}{value:>10.1f}" for name, value in found["host_us"].items()]
    verdict = "within" if found["host_ms"] <= found["limit_ms"] else "ABOVE"
    rows += [
        f"{'all of them':28}{1000 * found['host_ms']:>10.1f}   {verdict} {found['limit_ms']} ms",
        "",
        f"{'at a save':28}{'ms':>10}{'steps':>10}",
    ]
    rows += [
        f"{name:28}{value:>10.2f}{value / found['step_ms']:>10.2f}"
        for name, value in found["save_ms"].items()
    ]
    rows += [
        "",
        f"a save holds the loop for {found['save_in_steps']:.2f} steps; the fingerprints are "
        f"{found['fingerprints_in_steps']:.2f} of them",
        f"a step that judges spikes itself takes {judging['wall']:.3f} of one that does not, "
        f"{judging['cpu']:.3f} on the processors, {judging['fastest']:.3f} for the fastest",
        f"the record of a step takes {found['record_share']:.2%} of it, its hash included",
        f"comparing the copies every {EVERY} steps takes {found['copies_share']:.2%} of the time",
        f"load {found['load']:.1f} on {found['cores']} cores",
    ]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="of the run (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=12, help="of each compiled step (default: %(default)s)"
    )
    add_common_arguments(parser)
    parsed = parser.parse_args(arguments)
    try:
        config = from_resolved(resolved(CONFIG), parsed.set)
        with tempfile.TemporaryDirectory() as directory:
            run = of_a_run(config, parsed.steps, Path(directory))
        judging = of_the_devices(config, parsed.rounds, steps=5)
    except UserError as error:
        sys.exit(str(error))
    found = figures(run, judging)
    publish(table(found), found, parsed.json)


if __name__ == "__main__":
    main()
