"""Sinks: where the figures and events of a run are written.

RUN/metrics.jsonl and RUN/events.jsonl are always written; `log.sinks` names other sinks that we
ship, and `run(..., sinks=[...])` takes those of the caller.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from spmdtrain.config.run_files import EVENTS, METRICS
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report.json_lines import JsonLines, forget_after

Figures = Mapping[str, Any]


class Sink(Protocol):
    """A destination for the figures and events of a run. Only process 0 has sinks."""

    def metrics(self, step: int, figures: Figures) -> None:
        """Takes the figures of step `step` (1 is the first), or of an evaluation after it.

        A step has loss (the mean over its `tokens`, absent if there are none, or over its `pairs`
        where answers are compared), grad_norm, learning_rate, tokens (with a loss),
        tokens_per_second (of all tokens), step_seconds, mfu (None if the peak of the device is
        unknown) and input_seconds (that the loop waited for the batch). An evaluation has
        eval_loss, and eval_loss_ema if an average of the weights is kept.
        """

    def event(self, event: str, step: int, values: Figures) -> None:
        """Takes an event: started, resumed, evaluated, saved, stopped, finished, ..."""

    def close(self) -> None:
        """Closes the sink: the run has ended, well or not."""


# Opens a sink for a run: (directory, config, number of completed steps). A class whose constructor
# takes these three is one.
MakeSink = Callable[[Path, RunConfig, int], Sink]


class JsonLinesSink:
    """The files RUN/metrics.jsonl, one object per step or evaluation, and RUN/events.jsonl, one per
    event.
    """

    def __init__(self, directory: Path, config: RunConfig, step: int):  # noqa: ARG002
        self._directory = directory
        self._files: dict[str, JsonLines] = {}
        # Before the first save everything starts again, even an evaluation before step 1.
        forget_after(directory / METRICS, step or -1)

    def metrics(self, step: int, figures: Figures) -> None:
        self._file(METRICS).write(step=step, time=time.time(), **figures)

    def event(self, event: str, step: int, values: Figures) -> None:
        self._file(EVENTS).write(time=time.time(), event=event, step=step, **values)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> JsonLines:
        """Returns the file, which is created on the first write."""
        if name not in self._files:
            self._files[name] = JsonLines(self._directory / name)
        return self._files[name]
