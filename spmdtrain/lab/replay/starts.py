"""Reads RUN/starts, the records of a run's starts. Nothing here imports jax.

XLA reads its flags once, when jax starts, so a replay must know them by then.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import START, STARTS, RunFiles

Start = Mapping[str, Any]


def read_starts(run: Path) -> list[Start]:
    """Returns the records of a run's starts in order; a run of an older version has none."""
    paths = [path for path in (run / STARTS).glob("*.json") if path.stem.isdecimal()]
    starts = []
    for path in sorted(paths, key=lambda path: int(path.stem)):
        start = RunFiles(run).document(f"{STARTS}/{path.name}")
        if not is_start(start):
            raise CheckpointError(f"{path} is not the record of a start", fix="removing it")
        starts.append(start)
    return starts


def is_start(document: Any) -> bool:
    """Returns True if a JSON value is the record of a start."""
    match document:
        case {"from_step": int(), "config": {"model": {"vocab": int()}}, "origin": dict()}:
            return True
    return False


# A flag of XLA that is safe to take from a stranger's file: a number or a word, no path, no dump.
FLAG = re.compile(r"--xla_[a-z0-9_]+(=[\w.,+-]*)?")


def flags_of(start: Start | None) -> str:
    """Returns the XLA_FLAGS of a start without those that name files or dump programs."""
    text = start.get("xla_flags", "") if start else ""
    words = text.split() if isinstance(text, str) else []
    return " ".join(word for word in words if FLAG.fullmatch(word) and "dump" not in word)


def read_start(run: Path, step: int) -> Start | None:
    """Returns the start that took `step`, None if not recorded. `run` may be a bundle."""
    if (run / START).exists():
        start = RunFiles(run).document(START)
        return start if is_start(start) else None
    return next((start for start in reversed(read_starts(run)) if start["from_step"] < step), None)
