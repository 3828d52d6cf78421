"""What a run wrote about its steps: figures, fingerprints, and where its samples lay."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError
from spmdtrain.config.run_files import RunFiles

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class WrittenRun:
    """The files of a run, by step. `figures`: its lines of metrics.jsonl; `events`: events.jsonl.

    Numbers that are not finite are None, as JSON has them.
    """

    run: Path
    figures: Mapping[int, Figures]
    events: list[dict[str, Any]]

    @property
    def last(self) -> int:
        """The last step with figures; 0 if there is none."""
        return max(self.figures, default=0)

    def check_steps(self, first: int, last: int) -> None:
        """Raises CheckpointError unless there are figures of the steps `first` to `last`."""
        missing = [step for step in range(first, last + 1) if step not in self.figures]
        if missing:
            raise CheckpointError(
                f"{self.run}/metrics.jsonl has no figures of step {missing[0]}",
                found=f"steps up to {self.last}",
                fix=f"--step {self.last}" if self.last else "a run that has taken steps",
            )

    def sample_after(self, step: int, saved: int) -> int:
        """Returns the global index of the first sample after checkpoint `step`, which says `saved`.

        A run that went back to this checkpoint left out samples.
        """
        sample = saved
        for event in self.events:
            match event:
                case {"event": "rolled_back", "to_step": to, "samples": [_, last]} if to == step:
                    sample = last + 1
                case {"event": "resumed", "from_step": start} if start == step:
                    sample = saved
        return sample


def read_written(run: Path) -> WrittenRun:
    """Reads the files of a run. Raises CheckpointError if it is none."""
    files = RunFiles(run)
    figures: dict[int, dict[str, Any]] = {}
    for line in files.metrics:
        step = line.get("step")
        if isinstance(step, int) and "grad_norm" in line:
            figures[step] = line
    return WrittenRun(run, figures, files.events)
