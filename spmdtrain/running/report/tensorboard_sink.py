"""The sink of TensorBoard, which writes its event files in the thread that reports.

The writer of tensorboardX has a thread of its own: on a full disk that thread ends, its queue fills
up, and the run waits for it forever.
"""

import time
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report.json_lines import writing
from spmdtrain.running.report.sinks import Figures

FLUSH_SECONDS = 30.0  # longest time that a figure stays in memory; a flush waits for the disk


class TensorBoardSink:
    """TensorBoard's files in RUN/tensorboard, with a scalar per figure.

    They need tensorboardX, the extra `tensorboard`.

    The points of steps that a resumed run takes again are marked as superseded.
    """

    def __init__(self, directory: Path, config: RunConfig, step: int):  # noqa: ARG002
        self._folder = directory / "tensorboard"
        self._last = step
        self._file = EventFile(self._folder, step + 1)

    def metrics(self, step: int, figures: Figures) -> None:
        if step < self._last:  # the step is taken again
            self._file.close()
            self._file = EventFile(self._folder, step)
        self._last = step
        for name, value in figures.items():
            if value is not None:
                self._file.scalar(name, value, step)

    def event(self, event: str, step: int, values: Figures) -> None:
        """Flushes: an event should be visible at once."""
        del event, step, values
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class EventFile:
    """A new file of events in `folder`.

    Readers ignore what other files say about step `first` and later.

    Raises StorageError if it cannot be written, and ConfigError if tensorboardX is missing.
    """

    def __init__(self, folder: Path, first: int):
        try:
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2 as protocol
        except ImportError:
            raise ConfigError(
                "log.sinks names 'tensorboard', but tensorboardX is not installed",
                fix="pip install 'spmdtrain[tensorboard]'",
            ) from None
        self._folder = folder
        event_pb2: Any = protocol  # its classes are made when it is imported
        self._event = event_pb2.Event
        self._scalar = summary.scalar
        self._flushed = time.monotonic()
        with writing(folder):
            folder.mkdir(exist_ok=True)
            # A file is named after the second in which it is created: a run resumed within that
            # second would overwrite it.
            prefix = str(folder.absolute() / "events")
            self._writer = event_file_writer.EventsWriter(prefix, f".{time.time_ns()}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=first, session_log=start)
        self.flush()

    def scalar(self, name: str, value: float, step: int) -> None:
        """Writes one figure of a step."""
        self._write(step=step, summary=self._scalar(name, value))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Waits until everything is on the disk."""
        self._flushed = time.monotonic()
        with writing(self._folder):
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        with writing(self._folder):
            self._writer.close()

    def _write(self, **values: Any) -> None:
        event = self._event(wall_time=time.time(), **values)
        with writing(self._folder):
            self._writer.write_event(event)
