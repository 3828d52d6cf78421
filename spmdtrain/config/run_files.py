"""Reads the files of a run directory, which a kill may have cut short or a stranger may have made.

The run (running/) writes them; a resumed run, commands and the planner read them.
"""

import contextlib
import copy
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError

CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
COMPILED = "compiled.json"
SUMMARY = "summary.json"
PREDICTED = "predicted.json"
REPORT = "report.html"
STEPS = "steps.jsonl"
STARTS = "starts"  # a folder: N.json of the Nth start
BUNDLES = "bundles"  # a folder: a folder for each bad step, with the two files below
BUNDLE = "bundle.json"
START = "start.json"
CHECKPOINTS = "checkpoints"  # a folder: N of the state after N completed steps
QUARANTINE = "quarantine"  # a folder in it: damaged steps
EXPORTS = "exports"  # a folder: N of the published form of the state after N steps
PROFILE = "profile"  # a folder: stepN of a traced step, with the two files below
OPERATIONS = "operations.json"  # what each instruction of the program is
SECONDS = "seconds.json"  # the seconds in the trace, by sort of work and part of a step
MOST_OF_A_LINE = 1 << 20  # bytes; a line of figures has some hundreds
DERIVED = "derived"  # the origin of a setting that follows from others
ORIGINAL = "hf"  # a folder: files of the published model that a run was imported from


def given_in(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a document of `resolved` holds, without the derived ones.

    Older versions, which derived nothing, wrote null for them: an absent setting compares equal
    to null.
    """
    return _without(saved["config"], saved.get("origin", {}))


def _without(
    table: Mapping[str, Any], origin: Mapping[str, str], prefix: str = ""
) -> dict[str, Any]:
    """Returns a copy of the table without the derived settings."""
    return {
        name: _without(value, origin, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in copy.deepcopy(table).items()
        if origin.get(prefix + name) != DERIVED
    }


class RunFiles:
    """The files of the run in `directory`, each read when it is needed.

    Raises CheckpointError if one is missing, or was not written by a run.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, with the origin of each value: config.json."""
        saved = self.document(CONFIG)
        match saved:
            case {"config": {"model": {"vocab": int()}}, "origin": dict()}:
                return saved
            case {"model_type": str()}:
                fix = f"spmdtrain import {self.directory} --out RUN, and that run"
                raise self._is_none(CONFIG, " is that of a published model", fix)
            case _:
                raise self._is_none(CONFIG, " holds no resolved config")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The figures of each step and each evaluation: metrics.jsonl."""
        return self.lines(METRICS)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events, oldest first: events.jsonl."""
        return self.lines(EVENTS)

    def document(self, name: str) -> Any:
        """Returns the JSON file `name`."""
        text = self._text(name)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._is_none(name, f": {_cause(error)}") from None

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Returns the objects of a file of JSON lines; a kill may have cut the last one."""
        entries = []
        lines = self._text(name).splitlines()
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number == len(lines):
                    break
                raise self._is_none(name, f": line {number}: {_cause(error)}") from None
            if not isinstance(value, dict):
                raise self._is_none(name, f": line {number} is not a JSON object")
            entries.append(value)
        return entries

    def _text(self, name: str) -> str:
        path = self.directory / name
        try:
            is_file = stat.S_ISREG(path.stat().st_mode)
            if is_file:  # a pipe would keep its reader waiting
                return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or an impossible path
            raise self._is_none(name, f": {_cause(error)}") from None
        raise self._is_none(name, " is not a regular file")

    def _is_none(
        self, name: str, why: str, fix: str = "the directory of a run, which has a config.json"
    ) -> CheckpointError:
        return CheckpointError(
            f"{self.directory} is not a run directory: {self.directory / name}{why}",
            fix=fix,
        )


def newest_step(run: Path) -> int | None:
    """Returns the newest checkpoint below `run`; reads directory names only."""
    return max(steps_in(run), default=None)


def steps_in(run: Path) -> list[int]:
    """Returns the checkpoints below `run`, oldest first; reads directory names only."""
    folders = [path for path in (run / CHECKPOINTS).glob("*") if path.is_dir()]
    return sorted(int(path.name) for path in folders if path.name.isdecimal())


def newest_line(path: Path) -> dict[str, Any]:
    """Returns the last complete object of a file of JSON lines; empty if there is none.

    Only the end of the file is read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - MOST_OF_A_LINE, 0))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return {}


def birth_of(directory: Path) -> dict[str, Any]:
    """Returns the host, process and time at which a run's first attempt began.

    They identify the run, even if its directory is moved or copied.
    """
    first: dict[str, Any] = {}
    with (directory / EVENTS).open("rb") as file, contextlib.suppress(ValueError, RecursionError):
        first = json.loads(file.readline())
    return {name: first.get(name) for name in ("host", "pid", "time")}


def newest_lines(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """Returns the complete objects in the last bytes of a file of JSON lines, oldest first.

    A run may have millions of lines, and it waits while they are read.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(file.seek(0, os.SEEK_END) - most_bytes, 0)
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :]
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entries.append(json.loads(line))
    return [entry for entry in entries if isinstance(entry, dict)]


def _cause(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return getattr(error, "strerror", None) or str(error)
