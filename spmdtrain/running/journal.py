"""What a run leaves behind beside its checkpoints, and what it prints: config.json, compiled.json, metrics.jsonl (an
object per step or evaluation), events.jsonl and, once it ended, summary.json. Process 0 writes; the others are silent.
"""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax

from spmdtrain.running.metrics import JsonLines, numbers, writing
from spmdtrain.running.progress import Progress, tell


class Journal:
    """Use as a context. `progress` takes over the terminal while it is set."""

    def __init__(self, directory: Path):
        self.progress: Progress | None = None
        self._writes = jax.process_index() == 0
        self._directory = directory
        self._files: dict[str, JsonLines] = {}

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_) -> None:
        for file in self._files.values():
            file.close()

    def metrics(self, **values: Any) -> None:
        self._write("metrics.jsonl", values)

    def event(self, event: str, step: int, **values: Any) -> None:
        self._write("events.jsonl", {"time": time.time(), "event": event, "step": step} | values)

    def say(self, text: str) -> None:
        if self.progress:
            self.progress.say(text)
        elif self._writes:
            tell(text)

    def document(self, name: str, value: Any) -> None:
        """A whole JSON file, replaced at once."""
        if self._writes:
            path, spare = self._directory / name, self._directory / f"{name}.tmp"
            with writing(path):
                spare.write_text(json.dumps(numbers(value), indent=1))
                spare.replace(path)

    @contextlib.contextmanager
    def profile(self, step: int, chosen: Collection[int]) -> Iterator[Callable[[Any], Any]]:
        """Around the dispatch of `step`: if it is one of the chosen, a trace of it in profile/stepN.

        What the step gives has to pass through the function that this yields: the trace ends when it is computed.
        """
        if step not in chosen:
            yield lambda results: results
            return
        with jax.profiler.trace(self._directory / "profile" / f"step{step}"):
            yield jax.block_until_ready

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if not self._writes:
            return
        if name not in self._files:
            self._files[name] = JsonLines(self._directory / name)
        self._files[name].write(**values)
