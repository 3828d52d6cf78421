"""Reads one of the two runs of a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.config.arguments import as_run
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import COMPILED, RunFiles, given_in
from spmdtrain.lab.replay.starts import Start
from spmdtrain.lab.replay.written import WrittenRun, read_written


@dataclass(frozen=True)
class Side:
    """A run, as its files describe it.

    `config` has the resolved settings of `start`, the start that took the compared steps; `start`
    is empty for a run of an older version, which has no record of it. `compiled` is compiled.json
    of the last start, empty if missing.
    """

    run: Path
    written: WrittenRun
    config: Mapping[str, Any]
    start: Start
    compiled: Mapping[str, Any]

    @property
    def corpus(self) -> Any:
        """The fingerprint of the data."""
        return self.start.get("corpus")


def common_steps(a: WrittenRun, b: WrittenRun) -> list[int]:
    """Returns the steps that both runs have taken. Raises CheckpointError if there are none."""
    steps = sorted(a.figures.keys() & b.figures.keys())
    if not steps:
        last = f"{a.run} ends at step {a.last}, {b.run} at step {b.last}"
        what = f"{a.run} and {b.run} have taken no step in common"
        raise CheckpointError(what, found=last, fix="two runs that have taken steps")
    return steps


def read_run(run: str | Path, name: str) -> WrittenRun:
    """Reads the files of a run, which was passed as the argument `name`."""
    return read_written(as_run(run, name))


def side_at(written: WrittenRun, step: int) -> Side:
    """Returns a run as it was at `step`: settings may change when a run resumes."""
    files = RunFiles(written.run)
    start = written.start_of(step) or {}
    config = given_in(start if "config" in start else files.config)
    has_compiled = (written.run / COMPILED).exists()
    compiled = files.document(COMPILED) if has_compiled else {}
    document = compiled if isinstance(compiled, dict) else {}
    return Side(written.run, written, config, start, document)
