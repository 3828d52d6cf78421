"""The cases of the battery. Each breaks something so often, and returns what was measured.

A case takes a folder and a number of times, and returns figures, of which `passed` says whether all
was as promised and `control` what the detector says where it is switched off, or nothing is broken.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import tiny

from faults.damage import cut, flip_bit, flip_copy
from faults.hostile import ATTACKS
from faults.hostile import Case as Hostile
from faults.two_processes import STEP
from spmdtrain.config import CheckpointError, CorruptedError, to_toml
from spmdtrain.running import loop, restore
from spmdtrain.running.checkpoint import Checkpoints
from spmdtrain.running.replicas import ReplicaCheck
from spmdtrain.running.resume import newest_good
from spmdtrain.train.setup import init_state, shard

Figures = dict[str, Any]
ROOT = Path(__file__).parents[2]
SMALLEST = ("model.layers=1", "train.global_batch=2", "optimizer.schedule=constant")
SAVED = ("train.steps=3", "checkpoint.every=1", "checkpoint.keep=3", *SMALLEST)
NEWEST = 3


@dataclass(frozen=True)
class Case:
    """`quick` and `full`: how many times."""

    name: str
    promise: str
    run: Callable[[Path, int], Figures]
    quick: int
    full: int


# Damaged files


def damaged(break_it: Callable[[Path, random.Random], str]) -> Callable[[Path, int], Figures]:
    """The newest checkpoint is broken; what is read must be a state that was saved, to the last
    bit.
    """

    def run(folder: Path, times: int) -> Figures:
        config = tiny(*SAVED)
        devices = jax.devices()[:1]
        saved = folder / "saved"
        loop.run(config, saved, devices=devices)
        setup = shard(config, devices=devices)
        truth = {step: restore.restore(saved, setup, step) for step in range(1, NEWEST + 1)}

        def read(run: Path) -> tuple[int, bool]:
            with contextlib.closing(Checkpoints(run, setup, keep=3)) as checkpoints:
                found = newest_good(checkpoints, setup.state)
            return found.step, same_bits(found.state, truth[found.step])

        alarms = sum(read(saved)[0] != NEWEST for _ in range(times))
        draw = random.Random(0)
        counts = {"fell_back": 0, "wrong": 0, "silent_without_fingerprints": 0}
        for number in range(times):
            broken = folder / f"broken{number}"
            shutil.copytree(saved, broken)
            break_it(broken / "checkpoints" / str(NEWEST), draw)
            step, same = read(broken)
            counts["fell_back"] += step != NEWEST
            counts["wrong"] += not same
            with mock.patch.object(Checkpoints, "_verify", lambda *_: None):
                counts["silent_without_fingerprints"] += not read(broken)[1]
            shutil.rmtree(broken)
        return {
            "times": times,
            **counts,
            "false_alarms": alarms,
            "control": f"{counts['silent_without_fingerprints']} silent without fingerprints",
            "passed": counts["wrong"] == alarms == 0 and counts["fell_back"] > 0,
        }

    return run


def same_bits(got: Any, want: Any) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


# Processes that are killed and stopped


def command(folder: Path, run: str, *more: str, launch: tuple[str, ...] = ()) -> subprocess.Popen:
    """`spmdtrain train`, or `launch`, in `folder`; what it prints is in RUN.log."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    train = ("train", "run.toml", "--run", run, "--simulate-devices", "1", *more)
    with (folder / f"{run}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "spmdtrain.cli", *launch, *train],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )


def lines(path: Path) -> list[dict]:
    """The whole lines of a file that may be written just now."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run / "metrics.jsonl") if "loss" in line}


def acknowledged(run: Path) -> int:
    return max(
        (line["step"] for line in lines(run / "events.jsonl") if line["event"] == "saved"),
        default=0,
    )


def resumed(run: Path) -> int:
    return sum(line["event"] == "resumed" for line in lines(run / "events.jsonl"))


def sigkills(folder: Path, times: int) -> Figures:
    """SIGKILL at random instants of a run that saves after each step; it goes on each time, to the
    same losses.
    """
    settings = (f"train.steps={30 * (times + 1)}", "checkpoint.every=1", *SMALLEST)
    (folder / "run.toml").write_text(to_toml(tiny(*settings)))
    draw = random.Random(0)
    run = folder / "killed"
    lost = unrestorable = 0
    for _ in range(times):
        before = acknowledged(run)
        process = command(folder, "killed")
        while acknowledged(run) <= before and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        said = acknowledged(run)
        process.kill()
        unrestorable += process.wait() not in (-signal.SIGKILL, 0)
        config = tiny(*settings)
        setup = shard(config, devices=jax.devices()[:1])
        with contextlib.closing(Checkpoints(run, setup, keep=None)) as checkpoints:
            found = newest_good(checkpoints, setup.state)
        lost += found is None or found.step < said
    ended = command(folder, "killed").wait()
    control = command(folder, "undisturbed").wait()
    same = losses(run) == losses(folder / "undisturbed")
    return {
        "times": times,
        "acknowledged_and_lost": lost,
        "unrestorable": unrestorable,
        "losses_are_those_of_the_undisturbed_run": same,
        "control": f"the undisturbed run ends with {control}",
        "passed": lost == unrestorable == ended == control == 0 and same,
    }


def soak(folder: Path, times: int) -> Figures:
    """Two processes under `launch`: one of them is killed, stopped, or asked to end early, at
    random.
    """
    settings = ("train.steps=100000", "checkpoint.every=20", "mesh.data=2", *SMALLEST)
    (folder / "run.toml").write_text(to_toml(tiny(*settings)))
    draw = random.Random(0)
    run = folder / "soaked"
    watch = ("launch", "--local-processes", "2", "--step-seconds", "15", "--report", "report.json")
    launcher = command(folder, "soaked", launch=watch)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    wait_until(children.read_text, launcher, 60)
    start = time.monotonic()  # the account begins when the launcher has been imported
    recoveries = []
    for number in range(times):
        before = acknowledged(run)
        if not wait_until(lambda before=before: acknowledged(run) > before, launcher, 180):
            break
        time.sleep(draw.uniform(0, 2))
        wait_until(children.read_text, launcher, 60)
        victim = int(draw.choice(children.read_text().split()))
        os.kill(victim, (signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT)[number % 3])
        hit = time.monotonic()
        if wait_until(lambda number=number: resumed(run) > number, launcher, 180):
            recoveries.append(round(time.monotonic() - hit, 1))
    there = acknowledged(run)
    wait_until(lambda: acknowledged(run) > there, launcher, 180)
    launcher.send_signal(signal.SIGTERM)
    code = launcher.wait()
    wall = time.monotonic() - start
    report = json.loads((folder / "report.json").read_text())
    reached = acknowledged(run)
    steps = f"--set=train.steps={reached}"
    control = command(folder, "undisturbed", steps, launch=watch[:3]).wait()
    got, want = losses(run), losses(folder / "undisturbed")
    same = all(got[step] == want[step] for step in range(1, reached + 1))
    residual = abs(sum(report["seconds"].values()) - wall) / wall
    return {
        "times": times,
        "attempts": report["attempts"],
        "seconds_to_recover": recoveries,
        "steps": reached,
        "exit_code": code,
        "losses_are_those_of_the_undisturbed_run": same,
        "goodput": round(report["goodput"], 3),
        "residual": round(residual, 4),
        "control": f"the undisturbed run ends with {control}",
        "passed": len(recoveries) == times
        and code == 3
        and control == 0
        and same
        and residual < 0.01,
    }


def fewer(folder: Path, times: int) -> Figures:
    """Two processes under `launch` are killed, and started again as one, and as two: the mesh
    follows.
    """
    settings = ("train.steps=100000", "checkpoint.every=5", "mesh.data=2", *SMALLEST)
    (folder / "run.toml").write_text(to_toml(tiny(*settings)))
    run = folder / "fewer"
    recoveries = []
    for number in range(times + 1):
        count = 2 - number % 2
        launcher = command(folder, "fewer", launch=("launch", "--local-processes", str(count)))
        hit = time.monotonic()
        there = acknowledged(run)
        if wait_until(lambda there=there: acknowledged(run) > there + 5, launcher, 180) and number:
            recoveries.append(round(time.monotonic() - hit, 1))
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()
    steps = f"--set=train.steps={acknowledged(run)}"
    control = command(folder, "undisturbed", steps, "--set=mesh.data=1").wait()
    got, want = losses(run), losses(folder / "undisturbed")
    apart = max(abs(got[step] - want[step]) / want[step] for step in want)
    shapes = [line["mesh"]["data"] for line in lines(run / "events.jsonl") if "mesh" in line]
    expected = [2 - number % 2 for number in range(times + 1)]
    return {
        "times": times,
        "data_axis": shapes,
        "seconds_to_go_on": recoveries,
        "relative_difference_of_losses": float(f"{apart:.1g}"),
        "control": f"the undisturbed run ends with {control}",
        "passed": shapes == expected and len(recoveries) == times and apart < 1e-4 and control == 0,
    }


def bad_steps(folder: Path, times: int) -> Figures:
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
    for number in range(times):
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
        "times": times,
        "noticed": noticed,
        "as_if_they_had_never_been": same,
        "control": f"without the guard the loss of a bad step is {unguarded[8]:.0f}, "
        "and the run trains on it",
        "passed": noticed == same == times and hidden,
    }


def flipped_copies(folder: Path, times: int) -> Figures:
    """One bit of what one of 8 devices holds flips; the copies on the others tell which device."""
    del folder
    draw = random.Random(0)
    setup = shard(tiny("mesh.data=4", "mesh.tensor=2", *SMALLEST[:1]), devices=jax.devices()[:8])
    state = init_state(setup)
    alarms = named = 0
    for _ in range(times):
        device = draw.choice(list(setup.mesh.devices.flat))
        path = draw.choice(sorted(state.params))
        broken = replace(
            state, params=state.params | {path: flip_copy(state.params[path], device, draw)}
        )
        alarms += told_of(setup.mesh, state) != []
        named += told_of(setup.mesh, broken) == [device.id]
    return {
        "times": times,
        "named": named,
        "false_alarms": alarms,
        "control": f"{alarms} named where nothing has flipped",
        "passed": named == times and alarms == 0,
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
    program = [sys.executable, "-m", "faults.two_processes", kind, str(folder / kind), str(port)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with (folder / f"{kind}.log").open("w") as log:
        both = [
            subprocess.Popen(
                [*program, str(rank)], env=environment, stdout=log, stderr=log, cwd=folder
            )
            for rank in range(2)
        ]
        codes = [process.wait(300) for process in both]
    return codes, lines(folder / kind / "events.jsonl"), (folder / f"{kind}.log").read_text()


def watched(folder: Path, times: int) -> Figures:
    """Of two processes one is slow, or has a device whose bits flip: it is named."""
    steps = []
    right = 0
    for number in range(times):
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
        "times": times,
        "named": f"{right} of {2 * times}",
        "steps_until_the_slow_one_is_named": steps,
        "false_alarms": alarms,
        "control": f"{alarms} named where nothing is wrong",
        "passed": right == 2 * times and alarms == 0 and codes == [0, 0],
    }


def attacks(folder: Path, times: int) -> Figures:
    """A run directory from somebody else, attacked in each way: it is refused, and nothing outside
    it changes.
    """
    settings = (*SMALLEST, "model.embed=16", "train.steps=1")
    loop.run(tiny(*settings), folder / "saved", devices=jax.devices()[:1])
    setup = shard(tiny(*settings), devices=jax.devices()[:1])
    readers = (lambda run: restore.restore(run, setup), restore.weights)
    refused = changed = 0
    held = peak_memory()
    for number in range(times):
        case = Hostile(folder / str(number))
        shutil.copytree(folder / "saved", case.run)
        ATTACKS[number % len(ATTACKS)](case)
        before = case.files()
        for read in readers:
            try:
                read(case.run)
            except CheckpointError:
                refused += 1
        changed += case.files() != before
    grown = peak_memory() - held
    honest = sum(len(jax.tree.leaves(read(folder / "saved"))) > 0 for read in readers)
    return {
        "times": times,
        "refused": f"{refused} of {2 * times}",
        "changed_outside": changed,
        "MiB_more": round(grown),
        "control": f"{honest} of 2 read where nobody has touched it",
        "passed": refused == 2 * times and changed == 0 and grown < 256 and honest == 2,
    }


def peak_memory() -> float:
    """MiB, the most that this process has held up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def wait_until(condition: Callable[[], Any], process: subprocess.Popen, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


CASES = [
    Case(
        "bit flips",
        "What is read is what was saved, or the step before.",
        damaged(flip_bit),
        12,
        200,
    ),
    Case("cuts", "The same, where files are cut or missing.", damaged(cut), 6, 50),
    Case(
        "SIGKILL",
        "No step that was acknowledged is lost; the losses stay the same.",
        sigkills,
        1,
        200,
    ),
    Case(
        "bad steps",
        "A spike is skipped, and from several the run goes back, to the last bit.",
        bad_steps,
        2,
        24,
    ),
    Case(
        "hostile",
        "A run directory from somebody else is refused; nothing outside it is touched.",
        attacks,
        11,
        11,
    ),
    Case(
        "flipped copies",
        "A device that holds other bits than its copies is named.",
        flipped_copies,
        12,
        200,
    ),
    Case(
        "watched",
        "Of two processes, the slow one and the one with a broken device are named.",
        watched,
        1,
        10,
    ),
    Case(
        "fewer",
        "Started again with fewer processes, the run takes another mesh and the same batches.",
        fewer,
        1,
        6,
    ),
    Case(
        "soak",
        "Killed, stopped and aborted processes: the run goes on under `launch`.",
        soak,
        1,
        40,
    ),
]
