"""Cases of the files of a run: damaged ones, and those that somebody has made to do harm."""

import contextlib
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from helpers import tiny

from faults.damage import flip_weight
from faults.hostile import ATTACKS
from faults.hostile import Case as Hostile
from faults.runs import SMALLEST, command, configure, events, losses
from faults.turns import Figures, Turns
from spmdtrain.checkpoints import restore
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.checkpoints.newest import newest_good
from spmdtrain.checkpoints.retention import Retention
from spmdtrain.config import CheckpointError
from spmdtrain.config.schema import CheckpointConfig
from spmdtrain.running import loop
from spmdtrain.train.shard import shard

SAVED = ("train.steps=3", "checkpoint.every=1", "checkpoint.keep=3", *SMALLEST)
NEWEST = 3


def damaged(break_it: Callable[[Path, random.Random], str]) -> Callable[[Path, Turns], Figures]:
    """The newest checkpoint is broken; what is read must be a state that was saved, to the last
    bit.
    """

    def run(folder: Path, turns: Turns) -> Figures:
        config = tiny(*SAVED)
        devices = jax.devices()[:1]
        saved = folder / "saved"
        loop.run(config, saved, devices=devices)
        setup = shard(config, devices=devices)
        truth = {step: restore.restore(saved, setup, step) for step in range(1, NEWEST + 1)}

        def read(run: Path) -> tuple[int, bool]:
            with contextlib.closing(
                Checkpoints(run, setup, keep=Retention(CheckpointConfig(keep=3)))
            ) as checkpoints:
                found = newest_good(checkpoints, setup.state)
            return found.step, same_bits(found.state, truth[found.step])

        draw = random.Random(0)
        counts = {"fell_back": 0, "wrong": 0, "silent_without_fingerprints": 0, "false_alarms": 0}
        for number in turns:
            counts["false_alarms"] += read(saved)[0] != NEWEST
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
            **counts,
            "control": f"{counts['silent_without_fingerprints']} silent without fingerprints",
            "passed": counts["wrong"] == counts["false_alarms"] == 0 and counts["fell_back"] > 0,
        }

    return run


def damaged_for_two(folder: Path, turns: Turns) -> Figures:
    """Two processes hold half of each weight; the newest checkpoint is damaged in the half that
    one of them wrote, and reads.
    """
    configure(folder, *SAVED, "mesh.fsdp=2")
    launch = ("launch", "--local-processes", "2")
    more = f"--set=train.steps={NEWEST + 1}"
    codes = [command(folder, "saved", launch=launch).wait()]
    shutil.copytree(folder / "saved", folder / "undisturbed")
    codes += [command(folder, "undisturbed", more, launch=launch).wait()]
    alarms = len(events(folder / "undisturbed", "quarantined"))
    agreed = 0
    for number in turns:
        run = folder / f"{number}"
        shutil.copytree(folder / "saved", run)
        flip_weight(run / "checkpoints" / str(NEWEST), written_by=number % 2)
        code = command(folder, run.name, more, launch=launch).wait()
        [went_on] = [event["from_step"] for event in events(run, "resumed")]
        set_aside = [event["step"] for event in events(run, "quarantined")]
        same = losses(run) == losses(folder / "undisturbed")
        agreed += code == 0 and went_on == NEWEST - 1 and set_aside == [NEWEST] and same
    return {
        "went_on_together_from_the_step_before": f"{agreed} of {turns.taken}",
        "false_alarms": alarms,
        "control": f"without damage both go on from the newest, and end with {codes[-1]}",
        "passed": agreed == turns.taken and alarms == 0 and codes == [0, 0],
    }


def same_bits(got: Any, want: Any) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def attacks(folder: Path, turns: Turns) -> Figures:
    """A run directory from somebody else, attacked in each way: it is refused, and nothing outside
    it changes.
    """
    settings = (*SMALLEST, "model.embed=16", "train.steps=1")
    loop.run(tiny(*settings), folder / "saved", devices=jax.devices()[:1])
    setup = shard(tiny(*settings), devices=jax.devices()[:1])
    readers = (lambda run: restore.restore(run, setup), restore.weights)
    refused = changed = 0
    held = peak_memory()
    for number in turns:
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
    asked = len(readers) * turns.taken
    return {
        "refused": f"{refused} of {asked}",
        "changed_outside": changed,
        "MiB_more": round(grown),
        "control": f"{honest} of 2 read where nobody has touched it",
        "passed": refused == asked and changed == 0 and grown < 256 and honest == 2,
    }


def peak_memory() -> float:
    """MiB, the most that this process has held up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
