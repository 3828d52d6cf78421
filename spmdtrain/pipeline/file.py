"""Reads schedules from files, and writes them.

JSON has the form that `spmdtrain schedule --json` prints; CSV is for schedules written by hand.
"""

import csv
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.named_file import read_named
from spmdtrain.pipeline.check import LETTERS, check, check_units
from spmdtrain.pipeline.schedule import WORK, Table, assign_slots, units_of
from spmdtrain.pipeline.timing import Times, bubble_over_ideal, lockstep_idle

CSV_OPERATION = re.compile(r"([FBW])(\d{1,9})\.(\d{1,9})")
KIND_OF_LETTER = {letter: kind for kind, letter in LETTERS.items()}

Index = Annotated[int, Field(ge=0, lt=2**31)]
Unit = tuple[Index, Index]  # (microbatch, chunk)


class _Cell(BaseModel):
    """The work of one stage at one tick, as in a JSON file.

    `stash_slot` is where the forward leaves what its backward needs. A file may leave out all of
    them: then slots are assigned.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    forward: Unit | None = None
    backward: Unit | None = None
    weight: Unit | None = None
    stash_slot: Index | None = None


class _File(BaseModel):
    """The keys that are read; those that follow from the ticks (bubble_fraction ...) are not."""

    model_config = ConfigDict(strict=True)
    stages: PositiveInt
    chunks: PositiveInt
    microbatches: PositiveInt
    kind: str
    ticks: list[list[_Cell]]


def to_json(table: Table, times: Times | None = None) -> dict[str, Any]:
    """Returns the schedule as plain values for `json.dumps`; a unit is [microbatch, chunk].

    Bubble and hops are those of stages in lockstep at these times (default: 1 for each kind of
    work).
    """
    units = {kind: units_of(table, kind).tolist() for kind in WORK}

    def cell(tick: int, stage: int) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        for kind in WORK:
            unit = units[kind][tick][stage]
            entry[kind] = unit if unit[0] >= 0 else None
        slot = int(table.forward_slot[tick, stage])
        entry["stash_slot"] = slot if entry["forward"] else None
        return entry

    idle = lockstep_idle(table, times)
    ticks = [[cell(tick, stage) for stage in range(table.stages)] for tick in range(table.ticks)]
    return {
        "stages": table.stages,
        "chunks": table.chunks,
        "microbatches": table.microbatches,
        "kind": table.kind,
        "ticks": ticks,
        "bubble_fraction": idle.bubble,
        "hop_fraction": idle.hops,
        "bubble_over_ideal": bubble_over_ideal(table, times),
        "peak_stash": list(table.peak_stash),
    }


def read(path: str | Path) -> Table:
    """Reads the schedule in a .json or .csv file, and checks it.

    CSV has a row per tick and a cell per stage, with the units that run there in any order: `F3.0
    B1.1` is the forward of microbatch 3 in chunk 0 and the backward of microbatch 1 in chunk 1; W
    is a weight gradient; an empty cell is idle. Blank rows, and rows that start with #, are
    comments. The schedule is named after the file.

    Raises ConfigError if the file cannot be read, or with the first invariant that it breaks.
    """
    path = Path(path)
    try:
        text = read_named(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the pipeline schedule cannot be read", asked=str(path), found=str(error)
        ) from error
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
        raise _not_a_schedule(path, f"{where}: {first['msg']}") from error
    _check_rectangular(file.ticks, file.stages, path)
    units = _no_units(len(file.ticks), file.stages)
    stash = np.full((len(file.ticks), file.stages), -1, np.int32)
    for tick, row in enumerate(file.ticks):
        for stage, cell in enumerate(row):
            for kind in WORK:
                units[kind][tick, stage] = getattr(cell, kind) or (-1, -1)
            if cell.stash_slot is not None:
                stash[tick, stage] = cell.stash_slot
    return _make_table(file.kind, file.microbatches, file.chunks, units, stash)


def _from_csv(text: str, path: Path) -> Table:
    lines = text.splitlines()
    rows = list(csv.reader(line for line in lines if line.strip() and line.lstrip()[0] != "#"))
    if not rows:
        raise _not_a_schedule(path, "no rows")
    stages = len(rows[0])
    _check_rectangular(rows, stages, path)
    units = _no_units(len(rows), stages)
    for tick, row in enumerate(rows):
        for stage, cell in enumerate(row):
            for word in cell.split():
                _place_unit(word, units, tick, stage, path)

    # As many microbatches and chunks as the units name; missing units are found later.
    highest = np.max([array.max((0, 1)) for array in units.values()], axis=0)
    microbatches, chunks = (highest + 1).tolist()
    stash = np.full((len(rows), stages), -1)
    return _make_table(path.stem, microbatches, chunks, units, stash)


def _place_unit(word: str, units: dict[str, np.ndarray], tick: int, stage: int, path: Path) -> None:
    """Writes a CSV file's `F3.0`, found at this tick and stage, into `units`."""
    match = CSV_OPERATION.fullmatch(word)
    where = f"{word!r} at tick {tick}, stage {stage}"
    if not match:
        raise _not_a_schedule(path, where, fix="F3.0, B1.1 or W0.0")
    letter, microbatch, chunk = match.groups()
    unit = units[KIND_OF_LETTER[letter]][tick, stage]
    if unit[0] >= 0:
        raise ConfigError("a stage runs one unit of a kind at a tick", asked=str(path), found=where)
    unit[:] = int(microbatch), int(chunk)


def _no_units(ticks: int, stages: int) -> dict[str, np.ndarray]:
    """Returns for each kind of work [ticks, stages, (microbatch, chunk)], all -1."""
    return {kind: np.full((ticks, stages, 2), -1, np.int32) for kind in WORK}


def _check_rectangular(rows: list[list[Any]], stages: int, path: Path) -> None:
    for tick, row in enumerate(rows):
        if len(row) != stages:
            cells = f"{len(row)} at tick {tick}, {stages} stages"
            raise ConfigError("a tick has a cell for every stage", asked=str(path), found=cells)
    if not rows:
        raise _not_a_schedule(path, "no ticks")


def _make_table(
    kind: str,
    microbatches: int,
    chunks: int,
    units: dict[str, np.ndarray],
    stash: np.ndarray,
) -> Table:
    """Makes and checks the table of a file's units and stash slots [ticks, stages] (-1: none)."""
    check_units(microbatches, chunks, *units.values())
    by_hand = (stash >= 0).any()
    missing = np.argwhere((stash < 0) & (units["forward"][..., 0] >= 0))
    if by_hand and len(missing):
        tick, stage = missing[0]
        unset = f"none for the forward at tick {tick}, stage {stage}"
        raise ConfigError("stash slots are given for all forwards or for none", found=unset)
    slots_by_hand = stash if by_hand else None
    table = assign_slots(kind, microbatches, chunks, *units.values(), stash=slots_by_hand)
    check(table)
    return table


def _not_a_schedule(path: Path, detail: str, fix: str = "") -> ConfigError:
    return ConfigError("not a pipeline schedule", asked=str(path), found=detail, fix=fix)
