"""Sinks: where the figures and the events of a run are written.

RUN/metrics.jsonl and RUN/events.jsonl are always written; `log.sinks` names more that we ship, and
`run(..., sinks=[...])` takes those of the caller.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.json_lines import JsonLines, forget_after

Figures = Mapping[str, Any]


class Sink(Protocol):
    """What a run writes to. Only process 0 has sinks."""

    def metrics(self, step: int, figures: Figures) -> None:
        """Takes the figures of step `step` (1 is the first), or of an evaluation after it.

        A step has loss, grad_norm, learning_rate, tokens, tokens_per_second, step_seconds and mfu
        (None where the peak of the device is not known); an evaluation has eval_loss.
        """

    def event(self, event: str, step: int, values: Figures) -> None:
        """Takes what happened: started, resumed, evaluated, saved, stopped, finished, ..."""

    def close(self) -> None:
        """The run has ended, well or not."""


# Opens a sink for the run in a directory that goes on after so many completed steps. A class whose
# constructor takes these three is one.
MakeSink = Callable[[Path, RunConfig, int], Sink]


class JsonLinesSink:
    """RUN/metrics.jsonl, one object per step or evaluation, and RUN/events.jsonl, one per event."""

    def __init__(self, directory: Path, config: RunConfig, step: int):  # noqa: ARG002
        self._directory = directory
        self._files: dict[str, JsonLines] = {}
        forget_after(directory / "metrics.jsonl", step)

    def metrics(self, step: int, figures: Figures) -> None:
        self._file("metrics.jsonl").write(step=step, **figures)

    def event(self, event: str, step: int, values: Figures) -> None:
        self._file("events.jsonl").write(time=time.time(), event=event, step=step, **values)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> JsonLines:
        """The file, which is made when it is first written to."""
        if name not in self._files:
            self._files[name] = JsonLines(self._directory / name)
        return self._files[name]


class TensorBoardSink:
    """RUN/tensorboard: a scalar per figure. Needs tensorboardX, the extra `tensorboard`.

    The points of steps that a resumed run takes again are marked as superseded (`purge_step`).
    """

    def __init__(self, directory: Path, config: RunConfig, step: int):  # noqa: ARG002
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "log.sinks names 'tensorboard', but tensorboardX is not installed",
                fix="pip install 'spmdtrain[tensorboard]'",
            ) from None
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def metrics(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def event(self, event: str, step: int, values: Figures) -> None:
        """Flushes: what is worth an event is worth being seen."""
        del event, step, values
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


SHIPPED: Mapping[str, MakeSink] = {"tensorboard": TensorBoardSink}
