"""Reports on a run to the terminal, the sinks and the hooks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.errors import ConfigError, UserError
from spmdtrain.config.schema import RunConfig
from spmdtrain.running.report.json_lines import write_document
from spmdtrain.running.report.progress import Progress, tell
from spmdtrain.running.report.sinks import Figures, JsonLinesSink, MakeSink, Sink

# hook(event, step, figures): called in every process after a step ("step"), an evaluation
# ("evaluated") and a save that is complete on disk ("saved"). True stops the run.
Hook = Callable[[str, int, Figures], bool | None]


class Reporter:
    """The reports of a run, on their way to terminal, sinks and hooks.

    Use it as a context: its sinks are closed at the end.

    Programs read `step` and `event`: figures and facts, for files, sinks and hooks. A person at the
    terminal reads lines: that of an event, if it has one, and what `say` prints and nothing keeps,
    e.g. the introduction of the run. A launcher hears neither, only the pulse (processes/pulse.py).

    `step` is the number of completed steps from which the run continues. `sinks` come in addition
    to the files of the run and `log.sinks`. While `progress` is set, it owns the terminal.
    """

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        step: int,
        sinks: Sequence[MakeSink] = (),
        hooks: Sequence[Hook] = (),
    ):
        check(sinks, hooks)
        self.progress: Progress | None = None
        self.stop_asked = False  # set by a hook
        self._hooks = hooks
        self._more_hooks: Sequence[Hook] = ()
        self.directory = directory
        self._config = config
        self._makes = (JsonLinesSink, *map(shipped, config.log.sinks), *sinks)
        self._sinks: list[Sink] = []
        self._open(step)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        # A full disk refuses what is left too; the error that ended the run is the one to report.
        with contextlib.suppress(*([UserError] if error else [])):
            self._close()

    def go_back(self, step: int) -> None:
        """Opens the sinks again, as for a resumed run: the steps after `step` are taken again."""
        self._close()
        self._open(step)

    def _open(self, step: int) -> None:
        if jax.process_index() == 0:
            for make_sink in self._makes:
                self._sinks.append(_opened(make_sink, self.directory, self._config, step))

    def _close(self) -> None:
        with contextlib.ExitStack() as closing:  # each, even if another one cannot be closed
            for sink in reversed(self._sinks):
                closing.callback(sink.close)
            self._sinks = []

    def step(self, step: int, **figures: Any) -> None:
        """Reports the figures of one step."""
        for sink in self._sinks:
            sink.metrics(step, figures)
        self._call_hooks("step", step, figures)

    def evaluated(self, step: int, seconds: float, figures: Figures) -> None:
        """Reports the figures of an evaluation after `step`, which took `seconds`."""
        for sink in self._sinks:
            sink.metrics(step, figures)
        self.event("evaluated", step, **figures, seconds=seconds)

    def event(self, event: str, step: int, line: str = "", /, **values: Any) -> None:
        """Reports an event: something that a person asks about the next morning.

        `line` says it to the person at the terminal.
        """
        for sink in self._sinks:
            sink.event(event, step, values)
        if event in ("evaluated", "saved"):
            self._call_hooks(event, step, values)
        if line:
            self.say(line)

    def write(self, name: str, value: Any) -> None:
        """Writes a complete JSON file into the run directory; only process 0 does."""
        if jax.process_index() == 0:
            write_document(self.directory / name, value)

    def say(self, text: str) -> None:
        """Prints a line for the person at the terminal, and keeps it nowhere."""
        if self.progress:
            self.progress.say(text)
        elif jax.process_index() == 0:
            tell(text)

    @contextlib.contextmanager
    def telling(self, hooks: Sequence[Hook]) -> Iterator[None]:
        """Calls these hooks too, after those of the caller."""
        self._more_hooks = hooks
        try:
            yield
        finally:
            self._more_hooks = ()

    def _call_hooks(self, event: str, step: int, figures: Figures) -> None:
        for hook in (*self._hooks, *self._more_hooks):
            answer = hook(event, step, figures)
            if not isinstance(answer, bool | None):
                raise ConfigError(
                    f"the hook {_name(hook)} returned {answer!r:.60} after {event} of step {step}",
                    fix="True, which stops the run, or None",
                )
            self.stop_asked |= bool(answer)


def check(sinks: Sequence[MakeSink], hooks: Sequence[Hook]) -> None:
    """Raises ConfigError if the sinks or the hooks are not sequences of callables."""
    for word, callables, takes in (
        ("sinks", sinks, "sinks=[MySink], a class or function of (directory, config, step)"),
        ("hooks", hooks, "hooks=[my_hook], a function of (event, step, figures)"),
    ):
        listed = isinstance(callables, list | tuple)
        if not listed or not all(map(callable, callables)):
            raise ConfigError(f"{word}={callables!r:.80} is not a list of callables", fix=takes)


def shipped(name: str) -> MakeSink:
    """Returns the sink that `log.sinks` names; only a run that names it imports it."""
    if name == "tensorboard":
        from spmdtrain.running.report.tensorboard_sink import TensorBoardSink

        return TensorBoardSink
    from spmdtrain.running.report.wandb_sink import WandbSink

    return WandbSink


def _opened(make_sink: MakeSink, directory: Path, config: RunConfig, step: int) -> Sink:
    sink = make_sink(directory, config, step)
    missing = [
        name for name in ("metrics", "event", "close") if not callable(getattr(sink, name, None))
    ]
    if missing:
        raise ConfigError(
            f"the sink {_name(make_sink)} has no {' and no '.join(missing)}",
            fix="metrics(step, figures), event(event, step, values) and close()",
        )
    return sink


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
