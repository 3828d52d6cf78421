"""Reads a run's records of its steps: figures, hashes, fingerprints and starts.

A bundle (running/record/bundle.py) has the same files, limited to the steps before a bad one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint
from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import STEPS, RunFiles
from spmdtrain.lab.replay.starts import Start, read_starts

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class WrittenRun:
    """The files of a run, by step.

    `figures` are the lines of metrics.jsonl, with None for numbers that are not finite, as in JSON.
    `steps` are the lines of steps.jsonl, `events` those of events.jsonl, and `starts` the records
    in RUN/starts, in order.
    """

    run: Path
    figures: Mapping[int, Figures]
    steps: Mapping[int, Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    starts: Sequence[Start]

    @property
    def last(self) -> int:
        """The last step with figures; 0 if there is none."""
        return max(self.figures, default=0)

    def check_steps(self, first: int, last: int) -> None:
        """Raises CheckpointError unless the steps `first` to `last` have figures."""
        missing = [step for step in range(first, last + 1) if step not in self.figures]
        if missing:
            raise CheckpointError(
                f"{self.run}/metrics.jsonl has no figures of step {missing[0]}",
                found=f"steps up to {self.last}",
                fix=f"--step {self.last}" if self.last else "a run that has taken steps",
            )

    def start_of(self, step: int) -> Start | None:
        """Returns the start that took `step`: the last one before it, if recorded.

        Starts at or after `step` have not taken it again.
        """
        return next((start for start in reversed(self.starts) if start["from_step"] < step), None)

    def sample_after(self, step: int, saved: int) -> int:
        """Returns the global index of the first sample after checkpoint `step`, which has `saved`.

        They differ if the run went back to this checkpoint, since it then skips samples.
        """
        match self.steps.get(step + 1):
            case {"samples": [int() as first, int()]}:
                return first
        sample = saved
        for event in self.events:
            match event:
                case {"event": "rolled_back", "to_step": to, "samples": [_, last]} if to == step:
                    sample = last + 1
                case {"event": "resumed", "from_step": start} if start == step:
                    sample = saved
        return sample

    def tokens(self, step: int) -> str | None:
        """Returns the hash of a step's tokens, if it was recorded."""
        text = self.steps.get(step, {}).get("tokens")
        return text if isinstance(text, str) else None

    def prints(self, step: int) -> dict[str, Fingerprint] | None:
        """Returns the fingerprints of the state after a step, if they were recorded."""
        match self.steps.get(step):
            case {"after": dict() as after}:
                return {str(name): _print_of(text) for name, text in after.items()}
        return None


def _print_of(text: Any) -> Fingerprint:
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{16}", text):
        return (-1, -1)  # equal to none
    return int(text[:8], 16), int(text[8:], 16)


def read_written(run: Path) -> WrittenRun:
    """Reads the files of a run. Raises CheckpointError if it is not one."""
    files = RunFiles(run)
    lines = files.lines(STEPS) if (run / STEPS).exists() else []
    steps, figures = steps_and_figures(lines, files.metrics)
    return WrittenRun(run, figures, steps, files.events, read_starts(run))


def steps_and_figures(
    steps: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Returns the lines of steps.jsonl and of metrics.jsonl by step, without evaluations."""
    figures = {step: line for step, line in _by_step(metrics).items() if "grad_norm" in line}
    return _by_step(steps), figures


def _by_step(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the lines by step. Evaluations, which have no gradient norm, never replace steps."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = line.get("step")
        if isinstance(step, int) and ("grad_norm" in line or step not in by_step):
            by_step[step] = line
    return by_step
