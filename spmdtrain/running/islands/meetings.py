"""Exchanges files between islands, in a folder that all can reach.

    agreed/                 what all islands must have in common
    agreed-I/               what island I must have whenever it comes
    STEP/change-I/          the change of island I: its row, and what it weighs
    STEP/decided/           who takes part, with its weight
    STEP/mean-P/            part P of the mean change, in the order of the islands that take part
    promised/STEP-I/        island I is late, and will be at the meeting of STEP
    outer/STEP/             the outer weights and momentum after the meeting of STEP

Everything is a folder that is written aside and then renamed, which succeeds once: whoever comes
second leaves what is there. So it is decided once who takes part, and a meeting that an island
repeats, after it has resumed, comes out as before. Renaming a folder is all that is asked of the
file system; it may be a mounted one.

Each island that takes part averages one part of the row, reads that part alone of the others, and
reads the other parts of the mean. So it receives what it would in an all-reduce, whatever the
number of islands. A part whose island is gone is averaged by whoever waits for it.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spmdtrain.config.errors import ConfigError, StorageError
from spmdtrain.train.islands.changes import BLOCK, Row

AGREED, PROMISED, OUTER = "agreed", "promised", "outer"
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.5  # seconds between two looks into the folder
NUMBERS, SCALES, ABOUT = "numbers", "scales", "about.json"
Members = dict[int, float]  # the islands that take part, by index, with their weights


class Meetings:
    """The folder of the meetings, as island `index` sees it.

    `patience`: seconds to wait for another island. `waiting` is called while it waits. `sent` and
    `received` count the bytes of rows that it has written, and read of others.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        patience: float,
        waiting: Callable[[], Any] = lambda: None,
    ):
        self._folder = folder
        self._index = index
        self._patience = patience
        self._waiting = waiting
        self.sent = 0
        self.received = 0

    def agree(self, settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Compares settings with those of the others, and `own` with what this island had earlier.

        Raises ConfigError if they differ.
        """
        self._compare(Path(AGREED), settings, "islands that meet have it in common")
        self._compare(
            Path(f"{AGREED}-{self._index}"), own, "this island has met the others with it"
        )

    def _compare(self, where: Path, settings: Mapping[str, Any], why: str) -> None:
        self._publish(where, {ABOUT: json.dumps(settings).encode()})
        there = self._document(where)
        for name, own in json.loads(json.dumps(settings)).items():
            if there.get(name) != own:
                raise ConfigError(
                    f"{name} differs, and {why}",
                    asked=f"{name}={own}",
                    found=f"{there.get(name)} in {self._folder}",
                    fix=f"--set {name}={there.get(name)}, or another islands.directory",
                )

    def send(self, step: int, row: Row, weight: float) -> None:
        """Leaves the change of this island; 0 as weight: it has no say."""
        about = json.dumps({"weight": weight}).encode()
        files = {NUMBERS: row.numbers_n, SCALES: row.scales_b, ABOUT: about}
        if self._publish(_change(step, self._index), files):
            self.sent += row.nbytes

    def members(self, step: int) -> Members | None:
        """Returns who takes part in the meeting of this step; None if it is not decided."""
        if not (self._folder / _decided(step)).exists():
            return None
        return {int(index): weight for index, weight in self._document(_decided(step)).items()}

    def decide(self, step: int, expected: Collection[int]) -> Members:
        """Waits for the changes of the expected islands, and returns who takes part."""

        def is_ready() -> bool:
            return (self._folder / _decided(step)).exists() or all(
                (self._folder / _change(step, index)).exists() for index in expected
            )

        self._wait(is_ready)
        if self.members(step) is None:
            found = (self._folder / _meeting(step)).glob("change-*")
            present = sorted(int(each.name.partition("-")[2]) for each in found if _is_whole(each))
            weights = {i: self._document(_change(step, i))["weight"] for i in present}
            self._publish(_decided(step), {ABOUT: json.dumps(weights).encode()})
        members = self.members(step)
        assert members is not None, "it has just been decided"
        return members

    def change(self, step: int, index: int, part: slice) -> Row:
        """Returns a part of the change of an island; its ends are those of blocks."""
        return self._read(_change(step, index), part, count=index != self._index)

    def leave_mean(self, step: int, part: int, mean: Row) -> None:
        """Leaves a part of the mean change."""
        if self._publish(_mean(step, part), {NUMBERS: mean.numbers_n, SCALES: mean.scales_b}):
            self.sent += mean.nbytes

    def mean(self, step: int, part: int, own: bool, otherwise: Callable[[], Any]) -> Row:
        """Waits for a part of the mean change and returns it; `otherwise` makes it if none does."""
        self._wait((self._folder / _mean(step, part)).exists)
        if not (self._folder / _mean(step, part)).exists():
            otherwise()
        return self._read(_mean(step, part), slice(None), count=not own)

    def promise(self, step: int) -> None:
        """Tells the others that this island, which was away, will be at the meeting of `step`."""
        self._publish(_promise(step, self._index), {ABOUT: b"{}"})

    def promised(self, step: int) -> set[int]:
        """Returns the islands that were away, and have promised to come to this meeting."""
        found = (self._folder / PROMISED).glob(f"{step:09d}-*")
        return {int(each.name.partition("-")[2]) for each in found}

    def newest(self) -> int:
        """Returns the step of the newest meeting that is decided; 0 if none is."""
        steps = [int(each.name) for each in self._folder.glob("[0-9]*") if each.name.isdigit()]
        return max((step for step in steps if self.members(step) is not None), default=0)

    def leave_outer(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Leaves the outer weights and momentum after this meeting, and forgets older ones.

        What lies between the outer weights before these and these is kept.
        """
        self._publish(Path(OUTER) / f"{step:09d}", dict(values))
        *_, before = [0, *(each for each in self._steps_of_outer() if each < step)]
        for each in (*self._folder.glob("[0-9]*"), *(self._folder / OUTER).iterdir()):
            if each.name.isdigit() and int(each.name) < before:
                shutil.rmtree(each, ignore_errors=True)
        for each in (self._folder / PROMISED).glob("*"):
            if int(each.name.partition("-")[0]) < before:
                shutil.rmtree(each, ignore_errors=True)

    def outer(self, step: int, name: str) -> np.ndarray:
        """Returns a value of `leave_outer`, float32."""
        file = self._folder / OUTER / f"{step:09d}" / name
        found = np.fromfile(file, np.float32)
        self.received += found.nbytes
        return found

    def newest_outer(self) -> int:
        """Returns the step of the newest outer weights that were left; 0 if there are none."""
        return max(self._steps_of_outer(), default=0)

    def _steps_of_outer(self) -> list[int]:
        found = (self._folder / OUTER).glob("[0-9]*")
        return sorted(int(each.name) for each in found if each.name.isdigit())

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Waits until it is ready, or patience is at its end."""
        deadline = time.monotonic() + self._patience
        pause = SHORTEST_PAUSE
        while not is_ready() and (left := deadline - time.monotonic()) > 0:
            self._waiting()
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _publish(self, where: Path, files: Mapping[str, bytes | np.ndarray]) -> bool:
        """Writes a folder of files at once; returns False if it was there already."""
        target = self._folder / where
        aside = target.with_name(f".{target.name}.{self._index}")
        try:
            if target.exists():
                return False
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for name, content in files.items():
                with (aside / name).open("wb") as file:
                    _write(file, content)
            aside.rename(target)
        except OSError as error:
            if target.exists():  # another island was first
                shutil.rmtree(aside, ignore_errors=True)
                return False
            raise StorageError(
                f"the meeting of islands cannot be written: {error.strerror}",
                found=str(target),
                fix="room and permission in islands.directory",
            ) from None
        return True

    def _document(self, where: Path) -> Any:
        return json.loads((self._folder / where / ABOUT).read_text(encoding="utf-8"))

    def _read(self, where: Path, part: slice, count: bool) -> Row:
        """Reads a part of a row; counts its bytes if another island has written it."""
        folder = self._folder / where
        scales = (folder / SCALES).stat().st_size
        dtype = np.dtype(np.uint8 if scales else np.float32)
        start, stop, _ = part.indices((folder / NUMBERS).stat().st_size // dtype.itemsize)
        numbers = _some(folder / NUMBERS, dtype, start, stop)
        first, last = (start // BLOCK, stop // BLOCK) if scales else (0, 0)
        row = Row(numbers, _some(folder / SCALES, np.dtype(np.float32), first, last))
        self.received += row.nbytes if count else 0
        return row


def parts_of(length: int, islands: int) -> list[slice]:
    """Returns the part of a row of `length` numbers that each island averages, in whole blocks."""
    ends = [length // BLOCK * each // islands * BLOCK for each in range(islands + 1)]
    return [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def _write(file: BinaryIO, content: bytes | np.ndarray) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        content.tofile(file)
    file.flush()
    os.fsync(file.fileno())


def _some(file: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(file, dtype, stop - start, offset=start * dtype.itemsize)


def _is_whole(folder: Path) -> bool:
    """Returns True if a folder has its last name; one that is being written begins with a dot."""
    return not folder.name.startswith(".")


def _meeting(step: int) -> Path:
    return Path(f"{step:09d}")


def _change(step: int, index: int) -> Path:
    return _meeting(step) / f"change-{index}"


def _decided(step: int) -> Path:
    return _meeting(step) / "decided"


def _mean(step: int, part: int) -> Path:
    return _meeting(step) / f"mean-{part}"


def _promise(step: int, index: int) -> Path:
    return Path(PROMISED) / f"{step:09d}-{index}"
