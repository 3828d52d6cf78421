"""Cases of slow disks; full ones and read-only ones are in tests/checkpoints/test_storage.py."""

import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from helpers import tiny
from orbax.checkpoint._src.checkpointers import async_checkpointer

from faults.runs import SMALLEST, acknowledged, losses
from faults.turns import Figures, Turns
from spmdtrain.checkpoints.checkpoints import Checkpoints
from spmdtrain.running import loop

STEP_SECONDS = 0.05
SLOWER = 1.0  # seconds that a save takes longer than on a disk that is there
STEPS = 90


def slow_disk(folder: Path, turns: Turns) -> Figures:
    """Each save takes a second more before it is complete. Where saves are further apart than
    that, no step takes longer; where they are closer, each waits for the one before, and no two
    are under way at once.
    """
    wide: list[float] = []
    close: list[float] = []
    most = 0
    same = True
    for number in turns:
        free = timed(folder / f"{number}.free", every=30, slower=0.0)
        slow = timed(folder / f"{number}.slow", every=30, slower=SLOWER)
        behind = timed(folder / f"{number}.behind", every=10, slower=SLOWER)
        wide.append(slow.held - free.held)
        close.append(behind.held)
        most = max(most, slow.under_way, behind.under_way)
        same = same and free.losses == slow.losses == behind.losses
    held = statistics.median(wide)
    share = held / (30 * STEP_SECONDS)
    return {
        "seconds_more_that_a_save_holds_the_loop": round(held, 3),
        "share_of_the_time_between_saves": round(share, 4),
        "seconds_where_saves_are_too_close": round(statistics.median(close), 2),
        "most_under_way_at_once": most,
        "control": f"saves that are too close are waited for: {statistics.median(close):.2f} s",
        "passed": share <= 0.035 and most == 1 and same and statistics.median(close) > 0.2,
    }


class Timed:
    """Seconds for which a save holds the loop, the median; and how many were under way at once."""

    def __init__(self, held: list[float], under_way: int, losses: dict[int, float]):
        self.held = statistics.median(held)
        self.under_way = under_way
        self.losses = losses


def timed(run: Path, every: int, slower: float) -> Timed:
    """Trains for STEPS steps that take STEP_SECONDS, and saves so often, so much slower."""
    commit = async_checkpointer._on_commit_callback
    save = Checkpoints.save
    held: list[float] = []
    most = 0

    def slowly(*given: Any, **named: Any) -> None:
        time.sleep(slower)
        commit(*given, **named)

    def watched(checkpoints: Checkpoints, *given: Any) -> None:
        start = time.perf_counter()
        save(checkpoints, *given)
        held.append(time.perf_counter() - start)

    def step(event: str, _step: int, _: Any) -> None:
        nonlocal most
        if event == "step":
            time.sleep(STEP_SECONDS)
            most = max(most, len(list((run / "checkpoints").glob("*tmp*"))))

    settings = (*SMALLEST, f"train.steps={STEPS}", f"checkpoint.every={every}", "checkpoint.keep=9")
    with (
        mock.patch.object(async_checkpointer, "_on_commit_callback", slowly),
        mock.patch.object(Checkpoints, "save", watched),
    ):
        loop.run(tiny(*settings), run, devices=jax.devices()[:1], hooks=[step])
    assert acknowledged(run) == STEPS
    return Timed(held[1:], most, losses(run))
