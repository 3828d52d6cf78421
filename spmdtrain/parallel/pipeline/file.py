"""Schedules from and to files: JSON as `spmdtrain schedule --json` prints it, and CSV for those written by hand."""

import csv
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from spmdtrain.config.errors import ConfigError
from spmdtrain.parallel.pipeline.check import LETTERS, check, check_units
from spmdtrain.parallel.pipeline.schedule import WORK, Table, assign_slots
from spmdtrain.parallel.pipeline.timing import Times, bubble_fraction, bubble_over_ideal

CSV_OPERATION = re.compile(r"([FBW])(\d{1,9})\.(\d{1,9})")

Index = Annotated[int, Field(ge=0, lt=2**31)]
Unit = tuple[Index, Index]


class _Cell(BaseModel):
    """What a stage does at a tick; `stash_slot` is that of the forward, chosen for it where none of a file has one."""

    model_config = ConfigDict(strict=True, extra="forbid")
    forward: Unit | None = None
    backward: Unit | None = None
    weight: Unit | None = None
    stash_slot: Index | None = None


class _File(BaseModel):
    """What follows from the ticks (bubble_fraction and so on) is not read."""

    model_config = ConfigDict(strict=True)
    stages: PositiveInt
    chunks: PositiveInt
    microbatches: PositiveInt
    kind: str
    ticks: list[list[_Cell]]


def to_json(table: Table, times: Times | None = None) -> dict[str, Any]:
    """As `json.dumps` takes it; a unit is [microbatch, chunk]. The bubble is that of these times, in lockstep."""
    units = {kind: getattr(table, f"{kind}_microbatch").tolist() for kind in WORK}
    chunks = {kind: getattr(table, f"{kind}_chunk").tolist() for kind in WORK}

    def cell(tick: int, stage: int) -> dict[str, Any]:
        entry: dict[str, Any] = {
            kind: [units[kind][tick][stage], chunks[kind][tick][stage]] if units[kind][tick][stage] >= 0 else None
            for kind in WORK
        }
        return entry | {"stash_slot": int(table.forward_slot[tick, stage]) if entry["forward"] else None}

    return {
        "stages": table.stages,
        "chunks": table.chunks,
        "microbatches": table.microbatches,
        "kind": table.kind,
        "ticks": [[cell(tick, stage) for stage in range(table.stages)] for tick in range(table.ticks)],
        "bubble_fraction": bubble_fraction(table, times),
        "bubble_over_ideal": bubble_over_ideal(table, times),
        "peak_stash": list(table.peak_stash),
    }


def read(path: str | Path) -> Table:
    """The schedule of a .json or .csv file, checked; ConfigError names the first rule it breaks.

    CSV: a row per tick, a cell per stage with what runs there, in any order: `F3.0 B1.1` is the forward of microbatch 3
    in chunk 0 and the backward of microbatch 1 in chunk 1; W is a weight gradient; empty is idle. Rows starting with #
    and blank rows are comments. The schedule is called as the file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the pipeline schedule cannot be read", asked=str(path), found=str(error)) from error
    if path.suffix == ".json":
        return _from_json(text, path)
    if path.suffix == ".csv":
        return _from_csv(text, path)
    raise ConfigError("a pipeline schedule is a .json or .csv file", asked=str(path))


def _from_json(text: str, path: Path) -> Table:
    try:
        file = _File.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError("not a pipeline schedule", asked=str(path), found=f"{where}: {first['msg']}") from error
    _rectangular(file.ticks, file.stages, path)
    units = {kind: np.full((len(file.ticks), file.stages, 2), -1, np.int32) for kind in WORK}
    stash = np.full((len(file.ticks), file.stages), -1, np.int32)
    for tick, row in enumerate(file.ticks):
        for stage, cell in enumerate(row):
            for kind in WORK:
                units[kind][tick, stage] = getattr(cell, kind) or (-1, -1)
            stash[tick, stage] = -1 if cell.stash_slot is None else cell.stash_slot
    return _table(file.kind, file.microbatches, file.chunks, units, stash)


def _from_csv(text: str, path: Path) -> Table:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    rows = list(csv.reader(lines))
    if not rows:
        raise ConfigError("not a pipeline schedule", asked=str(path), found="no rows")
    _rectangular(rows, len(rows[0]), path)
    units = {kind: np.full((len(rows), len(rows[0]), 2), -1, np.int32) for kind in WORK}
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    for tick, row in enumerate(rows):
        for stage, cell in enumerate(row):
            for word in cell.split():
                match, where = CSV_OPERATION.fullmatch(word), f"{word!r} at tick {tick}, stage {stage}"
                if not match:
                    raise ConfigError("not a pipeline schedule", asked=str(path), found=where, fix="F3.0, B1.1 or W0.0")
                place = units[kinds[match[1]]][tick, stage]
                if place[0] >= 0:
                    raise ConfigError("a stage runs one unit of a kind at a tick", asked=str(path), found=where)
                place[:] = int(match[2]), int(match[3])
    most = np.max([array.max((0, 1)) for array in units.values()], axis=0)
    return _table(path.stem, int(most[0]) + 1, int(most[1]) + 1, units, np.full((len(rows), len(rows[0])), -1))


def _rectangular(rows: list[list[Any]], stages: int, path: Path) -> None:
    for tick, row in enumerate(rows):
        if len(row) != stages:
            found = f"{len(row)} at tick {tick}, {stages} stages"
            raise ConfigError("a tick has a cell for every stage", asked=str(path), found=found)
    if not rows:
        raise ConfigError("not a pipeline schedule", asked=str(path), found="no ticks")


def _table(kind: str, microbatches: int, chunks: int, units: dict[str, np.ndarray], stash: np.ndarray) -> Table:
    check_units(microbatches, chunks, *units.values())
    runs = units["forward"][..., 0] >= 0
    by_hand = (stash >= 0).any()
    if by_hand and ((stash < 0) & runs).any():
        tick, stage = np.argwhere((stash < 0) & runs)[0]
        found = f"none for the forward at tick {tick}, stage {stage}"
        raise ConfigError("stash slots are given for all forwards or for none", found=found)
    table = assign_slots(kind, microbatches, chunks, *units.values(), stash=stash if by_hand else None)
    check(table)
    return table
