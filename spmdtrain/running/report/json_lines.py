"""Writes files of JSON objects, one per line, and whole JSON documents; a full disk is a
StorageError.
"""

import json
import math
from pathlib import Path
from typing import Any

from spmdtrain.config.writing import replacing, writing


class JsonLines:
    """A file of JSON objects, one per line.

    Each is flushed, so a kill loses nothing that was reported.
    """

    def __init__(self, path: Path):
        self._path = path
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        with writing(self._path):
            self._file.write(json.dumps(numbers(values)) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path):  # closing tries to write the unwritten rest once more
            self._file.close()


def write_document(path: Path, value: Any) -> None:
    """Replaces the JSON file at `path` atomically: a reader sees the old or the new one."""
    with replacing(path, path.with_name(f"{path.name}.tmp")) as spare:
        spare.write_text(json.dumps(numbers(value), indent=1), encoding="utf-8")


def numbers(value: Any) -> Any:
    """Returns `value` with null for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def forget_after(path: Path, step: int) -> None:
    """Drops the lines of the steps after `step`, which a resumed run takes again.

    Malformed lines, such as a kill may leave at the end, are also dropped.
    """
    if not path.exists():
        return
    with replacing(path, path.with_suffix(".tmp")) as spare:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        earlier = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
        spare.write_text("".join(line + "\n" for line in earlier), encoding="utf-8")


def _step_of(line: str) -> int | None:
    try:
        at = json.loads(line)["step"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return at if isinstance(at, int) else None
