"""Reads the files of a run for its page, whichever exist and however the run ended.

A file may be missing, cut off when a process was killed, or come from a stranger. What cannot be
read is left out; only a directory without any file of a run is refused.
"""

import json
import math
import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import (
    COMPILED,
    CONFIG,
    EVENTS,
    METRICS,
    PREDICTED,
    PROFILE,
    SECONDS,
    SUMMARY,
)
from spmdtrain.lab.page.columns import Columns, MetricsFile

# The figures of events whose types the account of time relies on.
NUMBERS = ("seconds", "bytes", "time")
WHOLE = ("step", "to_step", "exit_code")
MOST_BYTES = 64 << 20  # of a JSON document


@dataclass(frozen=True)
class RunRead:
    """The contents of a run's files. Documents that are missing or damaged are empty."""

    name: str
    directory: str
    steps: Columns
    evaluations: Columns
    events: list[dict[str, Any]]
    config: dict[str, Any]  # sections of settings
    origin: dict[str, Any]
    compiled: dict[str, Any]
    summary: dict[str, Any]
    predicted: dict[str, Any]
    profile: dict[str, Any]  # profile of the newest step whose trace was summed up
    is_alive: bool

    def setting(self, section: str, name: str, default: Any = None) -> Any:
        """Returns a setting, or `default` if the config does not have it."""
        table = self.config.get(section)
        value = table.get(name) if isinstance(table, dict) else None
        return default if value is None else value

    def command(self, name: str, options: str) -> str:
        """Returns a command line for the run, with options for the code that the run names."""
        make = self.setting("model", "make")
        parts = [
            self.setting("own", part) for part in ("optimizer", "learning_rate", "loss", "data")
        ]
        homes = dict.fromkeys(part.partition(":")[0] for part in parts if isinstance(part, str))
        code = [f"--make {shlex.quote(make)}"] if isinstance(make, str) else []
        code += [f"--own {shlex.quote(home)}" for home in homes]
        return " ".join(["spmdtrain", name, shlex.quote(self.directory), options, *code])

    def of(self, event: str) -> list[dict[str, Any]]:
        """Returns the events with this name."""
        return [entry for entry in self.events if entry["event"] == event]


class RunReader:
    """A reader of one run, which can read again: of metrics.jsonl it then reads only new lines."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._metrics = MetricsFile(directory / METRICS)

    def read(self) -> RunRead:
        """Returns the current state of the run. Raises CheckpointError if there is none."""
        directory = self._directory
        if not any((directory / name).is_file() for name in (CONFIG, EVENTS, METRICS)):
            raise CheckpointError(
                f"{directory} is not a run directory: it has no {CONFIG}",
                fix="the directory of a run, which has a config.json",
            )
        metrics = self._metrics.read()
        config = _document(directory / CONFIG)
        events = _events(directory / EVENTS)
        return RunRead(
            name=directory.resolve().name,
            directory=str(directory),
            steps=metrics.steps,
            evaluations=metrics.evaluations,
            events=events,
            config=_table(config, "config"),
            origin=_table(config, "origin"),
            compiled=_document(directory / COMPILED),
            summary=_document(directory / SUMMARY),
            predicted=_document(directory / PREDICTED),
            profile=_newest_profile(directory),
            is_alive=not _has_ended(events) and _holds_lock(directory / "lock"),
        )


def _newest_profile(directory: Path) -> dict[str, Any]:
    paths = (directory / PROFILE).glob(f"step*/{SECONDS}")
    steps = {path.parent.name.removeprefix("step"): path for path in paths}
    numbered = {int(name): path for name, path in steps.items() if name.isdecimal()}
    return _document(numbered[max(numbered)]) if numbered else {}


def _document(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return {}
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table = document.get(name)
    return table if isinstance(table, dict) else {}


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError:
        lines = []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and (whole := _whole(event)):
            events.append(whole)
    return events


def _whole(event: dict[str, Any]) -> dict[str, Any] | None:
    """Returns an event without figures of the wrong type, or None without a name or a time."""
    event = {
        name: value
        for name, value in event.items()
        if not (name in NUMBERS and not is_number(value))
        and not (name in WHOLE and type(value) is not int)
    }
    needed = {"event", "step", "time"} | {"rolled_back": {"to_step"}, "ended": {"exit_code"}}.get(
        str(event.get("event")), set()
    )
    if not needed <= event.keys() or not isinstance(event["event"], str):
        return None
    if not isinstance(event.get("before", {}), dict):
        del event["before"]
    before = event.get("before", {})
    if not is_number(before.get("time", 0.0)):
        del event["before"]
    return event


def is_number(value: Any) -> bool:
    """Returns True if a value of a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _has_ended(events: list[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["event"] == "ended"


def _holds_lock(path: Path) -> bool:
    """Returns True if a process on this host or another holds the lock of the run."""
    holder = _document(path)
    match holder:
        case {"host": str(host), "pid": int(pid)}:
            return host != socket.gethostname() or os.path.exists(f"/proc/{pid}")
        case _:
            return False
