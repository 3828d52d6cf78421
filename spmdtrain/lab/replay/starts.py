"""Reads RUN/starts: how each start of a run began. Nothing here imports jax.

XLA reads its flags once, when jax starts, so a replay must know them before.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import START, STARTS, RunFiles

Start = Mapping[str, Any]


def read_starts(run: Path) -> list[Start]:
    """Returns the records of a run's starts, in order; none for a run of an older version."""
    paths = [path for path in (run / STARTS).glob("*.json") if path.stem.isdecimal()]
    found = []
    for path in sorted(paths, key=lambda path: int(path.stem)):
        start = RunFiles(run).document(f"{STARTS}/{path.name}")
        if not is_start(start):
            raise CheckpointError(f"{path} is not the record of a start", fix="removing it")
        found.append(start)
    return found


def is_start(document: Any) -> bool:
    """Returns True if a JSON value is the record of a start."""
    match document:
        case {"from_step": int(), "config": {"model": {"vocab": int()}}, "origin": dict()}:
            return True
    return False


# A flag of XLA that is safe to take from somebody else's file: no path, no dump, only a number or a
# word.
FLAG = re.compile(r"--xla_[a-z0-9_]+(=[\w.,+-]*)?")


def flags_of(start: Start | None) -> str:
    """Returns the XLA_FLAGS of a start, except those that name files or dump programs."""
    text = start.get("xla_flags", "") if start else ""
    words = text.split() if isinstance(text, str) else []
    return " ".join(word for word in words if FLAG.fullmatch(word) and "dump" not in word)


def read_start(run: Path, step: int) -> Start | None:
    """Returns the start that took `step`; None if that was not recorded. `run` may be a bundle."""
    if (run / START).exists():
        start = RunFiles(run).document(START)
        return start if is_start(start) else None
    return next((each for each in reversed(read_starts(run)) if each["from_step"] < step), None)
