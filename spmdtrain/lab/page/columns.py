"""Reads the figures of metrics.jsonl as columns, and thins them for drawing.

A figure takes eight bytes, so that a run of a million steps fits; lines are not kept as objects.
"""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from pydantic_core import from_json

CHUNK = 8 << 20  # bytes of lines that are parsed at once
EVALUATION = "eval_"  # the names of an evaluation's figures begin so


class Columns:
    """A table of figures: a float64 array for each name, with NaN where a row has none.

    Rows are in order of arrival.
    """

    def __init__(self):
        self._parts: list[tuple[int, dict[str, np.ndarray]]] = []
        self._whole: dict[str, np.ndarray] = {}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, part in self._parts for name in part))

    def add(self, rows: int, part: dict[str, np.ndarray]) -> None:
        """Adds rows; each array of `part` has one value for each of them."""
        self._parts.append((rows, part))
        self._whole = {}
        self._rows += rows

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a column, float64 [rows]."""
        if name not in self._whole:
            missing = [np.full(rows, math.nan) for rows, part in self._parts if name not in part]
            parts = [part[name] if name in part else missing.pop(0) for _, part in self._parts]
            self._whole[name] = np.concatenate(parts) if parts else np.zeros(0)
        return self._whole[name]


class MetricsFile:
    """The file metrics.jsonl: its `steps` and its `evaluations`. `read` reads what has been added.

    Damaged lines are left out; a kill may have cut the last one.
    """

    def __init__(self, path: Path):
        self._path = path
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._file: tuple[int, int] | None = None  # device and inode
        self.steps = Columns()
        self.evaluations = Columns()

    def read(self) -> "MetricsFile":
        """Reads the new lines, or all of them if the file has been replaced."""
        try:
            with self._path.open("rb") as file:
                self._take_in(file)
        except OSError:
            self._start_over()
        return self

    def _take_in(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._file != identity or status.st_size < self._offset:
            self._start_over()
        self._file = identity
        file.seek(self._offset)
        rest = b""
        while block := file.read(CHUNK):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                self._add(whole.split(b"\n"))
                self._offset += len(whole) + 1

    def _add(self, lines: list[bytes]) -> None:
        rows_with: dict[tuple[str, ...], list[tuple[int, Iterable[Any]]]] = {}
        for place, row in enumerate(_rows(lines)):
            if type(row) is dict and type(row.get("step")) is int:
                rows_with.setdefault(tuple(row), []).append((place, row.values()))
        for table, is_evaluation in ((self.steps, False), (self.evaluations, True)):
            groups = {
                names: rows
                for names, rows in rows_with.items()
                if any(name.startswith(EVALUATION) for name in names) == is_evaluation
            }
            if groups:
                table.add(*_as_columns(groups))


def _as_columns(
    groups: dict[tuple[str, ...], list[tuple[int, Iterable[Any]]]],
) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the number of rows and their columns, in the order of their places.

    `groups` has (place, values) of the rows with each set of names.
    """
    places = np.concatenate([[place for place, _ in rows] for rows in groups.values()])
    order = np.argsort(places)
    part = {}
    begin = 0
    for names, rows in groups.items():
        values = _matrix([tuple(row) for _, row in rows])
        for name, column in zip(names, values.T, strict=True):
            whole = part.setdefault(name, np.full(len(places), math.nan))
            whole[begin : begin + len(rows)] = column
        begin += len(rows)
    return len(places), {name: column[order] for name, column in part.items()}


def _rows(lines: list[bytes]) -> Iterable[Any]:
    try:
        return from_json(b"[" + b",".join(lines) + b"]", cache_strings="keys")
    except ValueError:
        return _those_that_parse(lines)


def _those_that_parse(lines: list[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield from_json(line)
        except ValueError:
            continue


def _matrix(rows: list[tuple[Any, ...]]) -> np.ndarray:
    """Returns rows of values as float64 [rows, values]; values that are not numbers become NaN."""
    try:
        matrix = np.array(rows, np.float64)
    except (ValueError, TypeError, OverflowError):  # a stranger's line
        matrix = None
    if matrix is None or matrix.ndim != 2:
        matrix = np.array([[_float(value) for value in row] for row in rows], np.float64)
    return matrix


def _float(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


class Thinned(NamedTuple):
    """A thinned curve: at `x` the mean, the minimum and the maximum of the points around it.

    `lowest` and `highest` are None if no point was left out.
    """

    x: np.ndarray
    mean: np.ndarray
    lowest: np.ndarray | None
    highest: np.ndarray | None


def thinned(x: np.ndarray, y: np.ndarray, buckets: int) -> Thinned:
    """Returns at most `buckets` points of a curve: means, with extremes so that no spike is lost.

    Largest-triangle thinning picks points instead, which biases the mean of a noisy curve.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= buckets:
        return Thinned(x, y, None, None)
    cut = np.linspace(0, len(x), buckets + 1).astype(int)[:-1]
    count = np.diff(np.append(cut, len(x)))
    mean_x, mean_y = np.add.reduceat(x, cut) / count, np.add.reduceat(y, cut) / count
    return Thinned(mean_x, mean_y, np.minimum.reduceat(y, cut), np.maximum.reduceat(y, cut))


def smoothed(y: np.ndarray, span: int) -> np.ndarray:
    """Returns the mean over the `span` values around each, so that it does not lag behind.

    Near the start the window shrinks symmetrically, since a loss falls steeply there. At the end
    only its earlier half is left, so that the end is nearly as smooth as the rest.
    """
    if not len(y):
        return y
    known = np.isfinite(y)
    total = np.cumsum(np.append(0.0, np.where(known, y, 0.0)))
    count = np.cumsum(np.append(0, known))
    at = np.arange(len(y))
    half = np.minimum(span // 2, at)
    low, high = at - half, np.minimum(at + half + 1, len(y))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[high] - total[low]) / (count[high] - count[low])


def known(y: np.ndarray) -> np.ndarray:
    """Returns the finite values."""
    return y[np.isfinite(y)]


def median(y: np.ndarray) -> float:
    """Returns the median of the finite values; NaN if there are none."""
    finite = known(y)
    return float(np.median(finite)) if len(finite) else math.nan


def quantile(y: np.ndarray, at: float) -> float:
    """Returns a quantile of the finite values; NaN if there are none."""
    finite = known(y)
    return float(np.quantile(finite, at)) if len(finite) else math.nan


def mean(y: np.ndarray) -> float:
    """Returns the mean of the finite values; NaN if there are none."""
    finite = known(y)
    return float(finite.mean()) if len(finite) else math.nan
