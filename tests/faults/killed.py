"""Cases of processes that are killed: a run that is alone, one of two, at each phase of a save."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import jax
from helpers import tiny

from faults.runs import (
    ENDLESS,
    PATIENT,
    SMALLEST,
    acknowledged,
    command,
    configure,
    events,
    lines,
    losses,
    ranks_of,
    seconds_until_gone,
    spread,
    start,
    undisturbed,
    wait_until,
)
from faults.saving import PHASES, SETTINGS
from faults.turns import Figures, Turns
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.newest import newest_good
from spmdtrain.data.source import open_data
from spmdtrain.launch.launch import EXIT_SECONDS
from spmdtrain.launch.ranks import TERM_SECONDS
from spmdtrain.running import loop
from spmdtrain.train.shard import shard

EACH_STEP = (ENDLESS, "checkpoint.every=1", *SMALLEST)
PAIR = 2  # processes
BEGINS = 5  # one kill in so many comes while the processes begin


def sigkills(folder: Path, turns: Turns) -> Figures:
    """SIGKILL at random instants of a run that saves after each step; it goes on each time, to the
    same losses. It goes over a small text many times, in another order each time, with dropout.
    """
    (folder / "text.txt").write_text("\n\n".join(f"{n} is {n * n} is odd" for n in range(60)))
    data = ("data.corpus=text", f"data.path={folder / 'text.txt'}", "data.packing=documents")
    characters = ("data.tokenizer=characters", "model.vocab=none", "model.dropout=0.1")
    settings = (*EACH_STEP, *data, *characters)
    configure(folder, *settings)
    config, _ = open_data(tiny(*settings))
    setup = shard(config, devices=jax.devices()[:1])
    draw = random.Random(0)
    run = folder / "killed"
    lost = unrestorable = 0
    for _ in turns:
        before = acknowledged(run)
        process = command(folder, "killed")
        began = wait_until(lambda before=before: acknowledged(run) > before, process, PATIENT)
        time.sleep(draw.uniform(0, 0.5))
        said = acknowledged(run)
        process.kill()
        unrestorable += process.wait() != -signal.SIGKILL or not began
        with contextlib.closing(Checkpoints(run, setup, keep=None)) as checkpoints:
            found = newest_good(checkpoints, setup.state)
        lost += found is None or found.step < said or bool(found.damaged)
    last = acknowledged(run)
    process = command(folder, "killed")
    wait_until(lambda: acknowledged(run) > last, process, PATIENT)
    process.terminate()
    ended = process.wait()
    reached = acknowledged(run)
    control, want = undisturbed(folder, reached)
    same = losses(run) == want
    return {
        "acknowledged_and_lost": lost,
        "unrestorable": unrestorable,
        "steps": reached,
        "losses_are_those_of_the_undisturbed_run": same,
        "control": f"the undisturbed run ends with {control}",
        "passed": lost == unrestorable == control == 0 and ended == 3 and same,
    }


def acknowledged_and_lost(run: Path) -> int:
    """Count how often the run went on from before a step that it had called saved."""
    said = lost = 0
    for line in lines(run / "events.jsonl"):
        if line["event"] == "saved":
            said = max(said, line["step"])
        elif line["event"] == "resumed":
            lost += line["from_step"] < said
    return lost


def kills_of_a_rank(folder: Path, turns: Turns) -> Figures:
    """Two processes under `launch` save after each step, and one of them is killed: mostly while
    they train, each fifth time while they begin. The launcher starts both again.
    """
    configure(folder, *EACH_STEP, "mesh.data=2")
    draw = random.Random(0)
    run = folder / "killed"
    launcher = command(folder, "killed", launch=("launch", "--local-processes", "2"))
    training: list[float] = []
    beginning: list[float] = []
    for number in turns:
        before = acknowledged(run)
        begins = number % BEGINS == BEGINS - 1
        if begins:
            time.sleep(draw.uniform(0, 8))
        else:
            wait_until(lambda before=before: acknowledged(run) > before, launcher, PATIENT)
            time.sleep(draw.uniform(0, 1))
        wait_until(lambda: len(ranks_of(launcher)) == PAIR, launcher, PATIENT)
        ranks = ranks_of(launcher)
        if not ranks:
            break
        victim = draw.choice(ranks)
        others = [pid for pid in ranks if pid != victim]
        hit = time.monotonic()
        kill(victim)
        seconds = seconds_until_gone(others, hit)
        if begins:
            beginning.append(seconds)
        else:
            training.append(seconds)
    last = acknowledged(run)
    wait_until(lambda: acknowledged(run) > last, launcher, PATIENT)
    launcher.terminate()
    ended = launcher.wait()
    reached = acknowledged(run)
    lost = acknowledged_and_lost(run)
    damaged = len(events(run, "quarantined"))
    control, want = undisturbed(folder, reached, processes=PAIR)
    got = losses(run)
    same = all(got.get(step) == want[step] for step in want)
    return {
        "acknowledged_and_lost": lost,
        "listed_and_unrestorable": damaged,
        "until_the_other_is_gone": spread(training),
        "the_same_while_they_begin": spread(beginning),
        "exit_code": ended,
        "steps": reached,
        "losses_are_those_of_the_undisturbed_run": same,
        "control": f"the undisturbed run ends with {control}",
        "passed": lost == damaged == control == 0
        and len(training) + len(beginning) == turns.taken
        and max(training) <= EXIT_SECONDS
        and max(beginning, default=0) <= EXIT_SECONDS + TERM_SECONDS + 1
        and ended == 3
        and same,
    }


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kills_while_saving(folder: Path, turns: Turns) -> Figures:
    """A run is killed at each phase of its third save, and goes on from there, to the same losses.

    The phases are named in saving.py: a program of its own changes Orbax so that it dies there.
    """
    step = 3
    names = list(PHASES)
    want_folder = folder / "undisturbed"
    loop.run(tiny(*SETTINGS), want_folder, devices=jax.devices()[:1])
    setup = shard(tiny(*SETTINGS), devices=jax.devices()[:1])
    kept: list[str] = []
    for number in turns:
        phase = names[number % len(names)]
        run = folder / str(number)
        program = ("-m", "faults.saving", phase, str(step), str(run))
        died = start(folder, program, str(number)).wait() == -signal.SIGKILL
        said = acknowledged(run)
        with contextlib.closing(Checkpoints(run, setup, keep=None)) as checkpoints:
            found = newest_good(checkpoints, setup.state)
        right = found is not None and found.step == step - (not PHASES[phase])
        loop.run(tiny(*SETTINGS), run, devices=jax.devices()[:1])
        unfinished = list((run / "checkpoints").glob("*tmp*"))
        same = losses(run) == losses(want_folder)
        if died and right and said < step and same and not unfinished:
            kept.append(phase)
    ended = sorted(losses(want_folder))
    return {
        "as_if_it_had_not_been_killed": f"{len(kept)} of {turns.taken}",
        "phases": ", ".join(dict.fromkeys(kept)),
        "control": f"the undisturbed run takes {len(ended)} steps",
        "passed": len(kept) == turns.taken and ended == list(range(1, 7)),
    }


def fewer(folder: Path, turns: Turns) -> Figures:
    """Two processes under `launch` are ended, and started again as one, and as two: the mesh
    follows.
    """
    configure(folder, ENDLESS, "checkpoint.every=5", "mesh.data=2", *SMALLEST)
    run = folder / "fewer"

    def train(count: int) -> float | None:
        """Seconds until it has saved five more steps, and it is ended then; None: it did not."""
        launcher = command(folder, "fewer", launch=("launch", "--local-processes", str(count)))
        hit = time.monotonic()
        there = acknowledged(run)
        went_on = wait_until(lambda: acknowledged(run) > there + 5, launcher, PATIENT)
        seconds = time.monotonic() - hit
        launcher.terminate()
        launcher.wait()
        return round(seconds, 1) if went_on else None

    train(2)
    recoveries = [train(1 + number % 2) for number in turns]
    reached = acknowledged(run)
    steps = f"--set=train.steps={reached}"
    control = command(folder, "undisturbed", steps, "--set=mesh.data=1").wait()
    got, want = losses(run), losses(folder / "undisturbed")
    apart = max(abs(got[step] - want[step]) / want[step] for step in want)
    shapes = [line["mesh"]["data"] for line in lines(run / "events.jsonl") if "mesh" in line]
    expected = [2, *(1 + number % 2 for number in range(turns.taken))]
    return {
        "data_axis": shapes,
        "seconds_to_go_on": recoveries,
        "relative_difference_of_losses": float(f"{apart:.1g}"),
        "control": f"the undisturbed run ends with {control}",
        "passed": shapes == expected and None not in recoveries and apart < 1e-4 and control == 0,
    }
