"""Exchanges files between islands, in a folder that all can reach.

    agreed/                 what all islands must have in common
    agreed-data/            the tokenizer of the data of all islands
    agreed-I/               which run island I is, and what it must have whenever it comes
    STEP/change-I/          the change of island I: its row, and what it weighs
    STEP/decided/           who takes part, with its weight
    STEP/mean-P/            part P of the mean change, in the order of the islands that take part
    promised/STEP-I/        island I is late, and will be at the meeting of STEP
    outer/STEP/             the outer weights and momentum after the meeting of STEP

Who takes part is decided once (folder.py), so a meeting that an island repeats, after it has
resumed, comes out as before.

Each island that takes part averages one part of the row, reads that part alone of the others, and
reads the other parts of the mean. So it receives what it would in an all-reduce, whatever the
number of islands. If the island of a part is gone, one that waits for the part averages
it.

The processes of an island share its work, and call each method together. They take the same turns,
as process 0 alone looks into the folder.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.processes.processes import (
    any_process,
    by_process_0,
    gather_texts,
    of_process_0,
    this_process,
)
from spmdtrain.running.islands.folder import Folder
from spmdtrain.train.islands.fragment_rows import BLOCK, Held, Range, Row

AGREED, PROMISED, OUTER = "agreed", "promised", "outer"
AGREED_DATA = "agreed-data"
IN_COMMON = "islands that meet have it in common"
RUN = "run"
LONGEST_LATE = 60.0  # seconds after which a mounted folder shows what another host has left
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.5  # seconds between two looks into the folder
CHANGE, MEAN = "change", "mean"
Members = dict[int, float]  # the islands that take part, by index, with their weights


class Meetings:
    """The meetings, as island `index` sees them in a folder.

    `patience`: seconds to wait for another island. `waiting` is called while it waits.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        patience: float,
        waiting: Callable[[], Any] = lambda: None,
    ):
        self.folder = Folder(folder, index)
        self._index = index
        self._patience = patience
        self._waiting = waiting

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Compares settings with those of the others. Raises ConfigError if they differ."""
        self.folder.leave(Path(AGREED), dict(settings))
        self._compare(Path(AGREED), settings, IN_COMMON)

    def agree_on_data(self, data: Mapping[str, Any]) -> None:
        """Compares what is known of the data with that of the others, as `agree` does settings."""
        self.folder.leave(Path(AGREED_DATA), dict(data))
        self._compare(Path(AGREED_DATA), data, IN_COMMON, fix="the same for all")

    def be_island(self, run: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Takes the place of this island for a run, which has it for good.

        `run` tells the run from every other; `own` is compared with what it had earlier. Raises
        ConfigError if another run is this island, or if a process does not see the folder.
        """
        where = Path(f"{AGREED}-{self._index}")
        self.folder.leave(where, {RUN: dict(run), **own})
        holder = by_process_0(lambda: self.folder.document(where)).get(RUN)
        if holder != json.loads(json.dumps(run)):
            raise ConfigError(
                f"islands.index={self._index} is taken: another run is this island",
                asked=_described(run),
                found=f"{_described(holder)} in {self.folder.root}",
                fix=f"another islands.index or islands.directory, or without {where} in that "
                "folder if the other run is gone for good",
            )
        self._compare(where, own, "this island has met the others with it")
        if any_process(not self._sees(where)):
            raise ConfigError(
                "a process of this island does not see what process 0 leaves in islands.directory",
                asked=f"islands.directory={self.folder.root}",
                fix="a folder that all hosts see as the same one",
            )

    def call_roll(self, count: int) -> None:
        """Waits until each of the islands has come once, so that none trains without the others.

        Raises ConfigError if one does not come in time.
        """
        places = {index: Path(f"{AGREED}-{index}") for index in range(count)}
        self._wait(lambda: all(map(self.folder.has, places.values())))
        missing = by_process_0(
            lambda: [index for index, place in places.items() if not self.folder.has(place)]
        )
        if missing:
            raise ConfigError(
                f"{_islands(missing)} of islands.count={count} did not come to the folder in "
                f"{self._patience:g} s",
                asked=f"islands.directory={self.folder.root}",
                fix="a folder that all islands see as the same one, each with an islands.index of "
                "its own, or a larger islands.patience",
            )

    def _sees(self, where: Path) -> bool:
        """Returns True once this process sees something: a mounted folder may be late."""
        deadline = time.monotonic() + min(self._patience, LONGEST_LATE)
        while not self.folder.has(where):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LONGEST_PAUSE)
        return True

    def _compare(self, where: Path, settings: Mapping[str, Any], why: str, fix: str = "") -> None:
        theirs = by_process_0(lambda: self.folder.document(where))
        for name, own in json.loads(json.dumps(settings)).items():
            if theirs.get(name) != own:
                raise ConfigError(
                    f"{name} differs, and {why}",
                    asked=f"{name}={own}",
                    found=f"{theirs.get(name)} in {self.folder.root}",
                    fix=f"{fix or f'--set {name}={theirs.get(name)}'}, "
                    "or another islands.directory",
                )

    def send(self, step: int, change: Held, weight: float) -> None:
        """Leaves the change of this island; 0 as weight: it has no say."""
        self.folder.leave(_change(step, self._index), {"weight": weight}, {CHANGE: change})

    def has_left(self, step: int) -> bool:
        """Returns True if the change of this island for this meeting is in the folder."""
        return by_process_0(lambda: self.folder.has(_change(step, self._index)))

    def members(self, step: int) -> Members | None:
        """Returns who takes part in the meeting of this step; None if it is not decided."""
        decided = by_process_0(
            lambda: self.folder.document(_decided(step)) if self._is_decided(step) else None
        )
        return (
            None if decided is None else {int(index): weight for index, weight in decided.items()}
        )

    def decide(self, step: int, expected: Collection[int]) -> Members:
        """Waits for the changes of the expected islands, and returns who takes part."""
        self._wait(
            lambda: (
                self._is_decided(step)
                or all(self.folder.has(_change(step, index)) for index in expected)
            )
        )
        if self.members(step) is None:
            self.folder.leave(_decided(step), by_process_0(lambda: self._present(step)))
        members = self.members(step)
        assert members is not None, "it has just been decided"
        return members

    def change(self, step: int, index: int, part: Range) -> Row:
        """Returns a part of the change of an island; its ends are those of blocks."""
        where = _change(step, index)
        own = [where] if index == self._index else []
        return self.folder.read([where], CHANGE, [part], own).row

    def leave_mean(self, step: int, part: int, mean: Held) -> None:
        """Leaves a part of the mean change."""
        self.folder.leave(_mean(step, part), {}, {MEAN: mean})

    def mean(
        self, step: int, members: Sequence[int], ranges: Sequence[Range], average: Callable
    ) -> Held:
        """Waits for the parts of the mean change that the members make, and returns its `ranges`.

        Calls `average(part)` for one that nobody makes in time.
        """
        parts = [_mean(step, part) for part in range(len(members))]
        for part, where in enumerate(parts):
            self._wait(lambda where=where: self.folder.has(where))
            if not by_process_0(lambda where=where: self.folder.has(where)):
                average(part)
        own = [parts[members.index(self._index)]] if self._index in members else []
        return self.folder.read(parts, MEAN, ranges, own)

    def promise(self, step: int) -> None:
        """Tells the others that this island, which was away, will be at the meeting of `step`."""
        self.folder.leave(_promise(step, self._index), {})

    def promised(self, step: int) -> set[int]:
        """Returns the islands that were away, and have promised to come to this meeting."""

        def found() -> list[int]:
            promises = (self.folder.root / PROMISED).glob(f"{step:09d}-*")
            return [int(promise.name.partition("-")[2]) for promise in promises]

        return set(by_process_0(found))

    def newest(self) -> int:
        """Returns the step of the newest meeting that is decided; 0 if none is."""
        return by_process_0(
            lambda: max(filter(self._is_decided, _steps(self.folder.root)), default=0)
        )

    def leave_outer(self, step: int, values: Mapping[str, Held]) -> None:
        """Leaves the outer weights and momentum after this meeting, and forgets older ones.

        What lies between the outer weights before these and these is kept.
        """
        self.folder.leave(_outer(step), {}, values)
        by_process_0(lambda: self._forget_before(step))

    def outer(self, step: int, name: str, ranges: Sequence[Range]) -> Held:
        """Returns ranges of a value of `leave_outer`."""
        return self.folder.read([_outer(step)], name, ranges)

    def newest_outer(self) -> int:
        """Returns the step of the newest outer weights that were left; 0 if there are none."""
        return by_process_0(lambda: max(_steps(self.folder.root / OUTER), default=0))

    def traffic(self) -> tuple[int, int]:
        """Returns the bytes of rows that the island has written, and read of others, so far."""
        of_all = gather_texts(json.dumps([self.folder.sent, self.folder.received]))
        sent, received = zip(*map(json.loads, of_all), strict=True)
        return sum(sent), sum(received)

    def _is_decided(self, step: int) -> bool:
        return self.folder.has(_decided(step))

    def _present(self, step: int) -> Members:
        """Returns who has left a change for this meeting; only process 0 asks."""
        changes = (self.folder.root / _meeting(step)).glob("change-*")
        present = sorted(int(change.name.partition("-")[2]) for change in changes)
        return {i: self.folder.document(_change(step, i))["weight"] for i in present}

    def _forget_before(self, step: int) -> None:
        """Removes meetings and promises before the last outer weights before this step."""
        root = self.folder.root
        before = max((each for each in _steps(root / OUTER) if each < step), default=0)
        for folder in (root, root / OUTER, root / PROMISED):
            for each in folder.glob("[0-9]*"):
                if int(each.name.partition("-")[0]) < before:
                    shutil.rmtree(each, ignore_errors=True)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Waits until it is ready, or patience is at its end; process 0 says which it is."""
        deadline = time.monotonic() + self._patience
        process, _ = this_process()
        pause = SHORTEST_PAUSE
        while True:
            seconds = deadline - time.monotonic()
            is_over = process == 0 and (is_ready() or seconds <= 0)
            if of_process_0(int(is_over)):
                return
            self._waiting()
            time.sleep(min(pause, max(seconds, 0)))
            pause = min(2 * pause, LONGEST_PAUSE)


def _described(run: Mapping[str, Any] | None) -> str:
    """Describes a run, of `be_island`, for a person."""
    if not run:
        return "a run of another version"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(run.get("time") or 0))
    return f"the run that began on {run.get('host')} at {began} UTC as process {run.get('pid')}"


def _islands(indices: Sequence[int]) -> str:
    """Lists islands, such as "islands 1, 3"."""
    return f"island{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def parts_of(whole: Range, ways: int) -> list[Range]:
    """Returns a range cut into much the same parts, of whole blocks."""
    start, end = whole
    blocks = (end - start) // BLOCK
    cuts = [start + blocks * part // ways * BLOCK for part in range(ways + 1)]
    return list(pairwise(cuts))


def _steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder here; one that is being written begins with a dot."""
    return [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]


def _meeting(step: int) -> Path:
    return Path(f"{step:09d}")


def _change(step: int, index: int) -> Path:
    return _meeting(step) / f"change-{index}"


def _decided(step: int) -> Path:
    return _meeting(step) / "decided"


def _mean(step: int, part: int) -> Path:
    return _meeting(step) / f"mean-{part}"


def _outer(step: int) -> Path:
    return Path(OUTER) / f"{step:09d}"


def _promise(step: int, index: int) -> Path:
    return Path(PROMISED) / f"{step:09d}-{index}"
