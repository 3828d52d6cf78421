"""Shows what a command is doing before it has results, and for how long.

A stage is a few words, such as "compiling the step". On a terminal they form a live line with the
time since the command began; elsewhere each stage prints a line when it begins, and more if it
takes long. Nothing is printed except inside `shown`, which a command enters before it imports jax.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

BLINK = 0.25  # seconds between updates of a live line
SILENCE = 30.0  # seconds without a line in a log
ERASE = "\r\x1b[2K"

_shown: "_Stages | None" = None


@contextlib.contextmanager
def shown(stream: TextIO | None = None, *, quiet: bool = False) -> Iterator[None]:
    """Shows the stages of a command on `stream` (default: standard output) until `end`."""
    global _shown
    _shown = None if quiet else _Stages(stream or sys.stdout)
    try:
        yield
    finally:
        end()


def enter(stage: str) -> None:
    """Says that the command is now at `stage`."""
    if _shown:
        _shown.enter(stage)


def end() -> None:
    """Ends the stages: the command has something to show, or has ended."""
    global _shown
    stages, _shown = _shown, None
    if stages:
        stages.end()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Hides the live line while something else is printed."""
    if _shown is None:
        yield
        return
    with _shown.aside():
        yield


class _Stages:
    """The stages of one command; a separate thread keeps the time."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_live = stream.isatty()
        self._began = time.monotonic()
        self._stage = ""
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._keep_time, daemon=True)

    def enter(self, stage: str) -> None:
        with self._lock:
            self._stage = stage
            self._say(stage)
        if not self._watch.is_alive():
            self._watch.start()

    def end(self) -> None:
        self._is_over.set()
        with self.aside():
            self._stage = ""
        if self._watch.is_alive():
            self._watch.join()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        with self._lock:
            if self._is_live and self._stage:
                self._write(ERASE)
            yield
            if self._is_live and self._stage:
                self._say(self._stage)

    def _keep_time(self) -> None:
        pause = BLINK if self._is_live else SILENCE
        while not self._is_over.wait(pause):
            with self._lock:
                if not self._is_over.is_set():
                    self._say(self._stage if self._is_live else f"still {self._stage}")

    def _say(self, words: str) -> None:
        seconds = f"[{time.monotonic() - self._began:.1f} s]"
        self._write(f"{ERASE}{seconds} {words}" if self._is_live else f"{seconds} {words}\n")

    def _write(self, text: str) -> None:
        # The reader may be gone: the next print finds out.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
