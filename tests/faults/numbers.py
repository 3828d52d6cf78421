"""Cases of wrong numbers: bad steps, bits that flip on a device, a process that is slow."""

import random
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import tiny

from faults.damage import flip_copy
from faults.runs import SMALLEST, lines, losses, start
from faults.turns import Figures, Turns
from faults.two_processes import STEP
from spmdtrain.config import CorruptedError
from spmdtrain.running import loop
from spmdtrain.running.guards.replicas import ReplicaCheck
from spmdtrain.train.fresh import init_state
from spmdtrain.train.shard import shard


def bad_steps(folder: Path, turns: Turns) -> Figures:
    """Batches at random steps, one or three in a row, make the gradient infinite, or a thousand
    times too large.

    Under `rollback` a single one is skipped, and three send the run back; either way it ends as if
    they had never been.
    """
    batch, steps, poison = 4, 16, 63
    settings = (
        *SMALLEST,
        f"train.global_batch={batch}",
        "model.embed=16",
        "checkpoint.every=2",
        "checkpoint.keep=3",
    )
    watch = ("guard.policy=rollback", "guard.most_skipped=2", "guard.window=8", "guard.sigmas=20")
    draw = random.Random(0)
    one = jax.devices()[:1]

    def losses_of(factor: float) -> Callable[..., jax.Array]:
        def spiking(logits: jax.Array, targets: jax.Array) -> jax.Array:
            found = optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), targets
            )
            return jnp.where(targets == poison, factor * found, found)

        return spiking

    def samples(bad: range, left_out: range) -> Callable[[int, int], np.ndarray]:
        """`bad`: steps with a poisoned sample; `left_out`: samples that are not there at all."""

        def tokens(_: int, index: int) -> np.ndarray:
            index += len(left_out) if index >= left_out.start else 0
            ids = np.random.default_rng(index).integers(0, poison, 17, np.int32)
            if index // batch + 1 in bad and index % batch == 1:
                ids[3] = poison
            return ids

        return tokens

    def train(name: str, data: Any, factor: float, count: int, *more: str) -> dict[int, float]:
        config = tiny(*settings, *more, f"train.steps={count}")
        loop.run(config, folder / name, devices=one, data=data, loss=losses_of(factor))
        return losses(folder / name)

    noticed = same = 0
    for number in turns:
        first, length = draw.randrange(7, 12), 1 + 2 * (number % 2)
        factor = (1e30, 1000.0)[number // 2 % 2]  # the square of the first is infinite
        bad = range(first, first + length)
        got = train(f"{number}", samples(bad, range(0)), factor, steps, *watch)
        found = lines(folder / f"{number}" / "events.jsonl")
        kinds = [
            (line["event"], line["step"])
            for line in found
            if line["event"] in ("skipped", "rolled_back")
        ]
        back = [line for line in found if line["event"] == "rolled_back"]
        noticed += kinds == [("skipped", step) for step in bad[:2]] + [("rolled_back", bad[-1])] * (
            length == 3
        )
        if back:
            start, last = back[0]["samples"]
            want = train(
                f"{number}.clean", samples(range(0), range(start, last + 1)), factor, steps, *watch
            )
            same += got == want
        else:
            alone = train(
                f"{number}.alone",
                samples(bad, range(0)),
                factor,
                steps,
                *watch,
                "guard.policy=skip",
            )
            same += got == alone
    unguarded = train("unguarded", samples(range(8, 9), range(0)), 1000.0, steps)
    hidden = unguarded[8] > 10 * unguarded[7]
    return {
        "noticed": noticed,
        "as_if_they_had_never_been": same,
        "control": f"without the guard the loss of a bad step is {unguarded[8]:.0f}, "
        "and the run trains on it",
        "passed": noticed == same == turns.taken and hidden,
    }


def flipped_copies(folder: Path, turns: Turns) -> Figures:
    """One bit of what one of 8 devices holds flips; the copies on the others tell which device."""
    del folder
    draw = random.Random(0)
    setup = shard(tiny("mesh.data=4", "mesh.tensor=2", *SMALLEST[:1]), devices=jax.devices()[:8])
    state = init_state(setup)
    alarms = named = 0
    for _ in turns:
        device = draw.choice(list(setup.mesh.devices.flat))
        path = draw.choice(sorted(state.params))
        broken = replace(
            state, params=state.params | {path: flip_copy(state.params[path], device, draw)}
        )
        alarms += told_of(setup.mesh, state) != []
        named += told_of(setup.mesh, broken) == [device.id]
    return {
        "named": named,
        "false_alarms": alarms,
        "control": f"{alarms} named where nothing has flipped",
        "passed": named == turns.taken and alarms == 0,
    }


def told_of(mesh: Any, state: Any) -> list[int]:
    """The devices that the copies tell of."""
    reporter = mock.Mock()
    try:
        ReplicaCheck(mesh, 1, reporter).before_save(0, state)
    except CorruptedError:
        return reporter.event.call_args.kwargs["devices"]
    return []


def two_processes(folder: Path, kind: str) -> tuple[list[int], list[dict], str]:
    """Exit codes, events and what was said, of two processes of which one has a fault."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    program = ("-m", "faults.two_processes", kind, str(folder / kind), str(port))
    both = [start(folder, (*program, str(rank)), kind) for rank in range(2)]
    codes = [process.wait(300) for process in both]
    return codes, lines(folder / kind / "events.jsonl"), (folder / f"{kind}.log").read_text()


def watched(folder: Path, turns: Turns) -> Figures:
    """One of two processes is slow, or has a device whose bits flip: it is named."""
    steps = []
    right = 0
    for number in turns:
        here = folder / str(number)
        here.mkdir()
        codes, events, _ = two_processes(here, "slow")
        slow = [
            (event["process"], event["step"]) for event in events if event["event"] == "straggler"
        ]
        steps += [step - STEP for _, step in slow[:1]]
        broken, events, said = two_processes(here, "flip")
        flips = [event for event in events if event["event"] == "corrupted"]
        right += codes == [0, 0] and [rank for rank, _ in slow] == [1]
        right += (
            set(broken) == {11}
            and len(flips) == 1
            and len(flips[0]["devices"]) == 1
            and "of process 1" in said
        )
    codes, events, _ = two_processes(folder, "none")
    alarms = sum(event["event"] in ("straggler", "corrupted") for event in events)
    return {
        "named": f"{right} of {2 * turns.taken}",
        "steps_until_the_slow_one_is_named": steps,
        "false_alarms": alarms,
        "control": f"{alarms} named where nothing is wrong",
        "passed": right == 2 * turns.taken and alarms == 0 and codes == [0, 0],
    }
