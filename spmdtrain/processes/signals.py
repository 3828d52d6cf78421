"""Ends a command promptly on a signal: one line, and exit code 128 + the signal's number.

The signals are SIGINT (Ctrl-C) and SIGTERM, the early warnings of schedulers, SIGUSR1 and SIGUSR2,
and SIGHUP of a closed terminal.

Python itself would raise KeyboardInterrupt wherever its main thread happens to be: in an import,
which turns it into another error; in a callback, which prints and forgets it; or only once a
compilation is over. So a thread receives the signal and ends the process.

There are two exceptions. A command with files to clean up gets KeyboardInterrupt (`cleaning_up`).
The loop takes the signals over and saves first (running/guards/interrupt.py); a second signal ends
it immediately, even while its main thread waits for devices.

This file imports little and nothing of ours: until it is active, Ctrl-C shows a traceback.
"""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

COMMANDS = (signal.SIGINT, signal.SIGTERM)
WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
HANDED_ON_SECONDS = 2.0  # within which a launcher forwards what a scheduler sent to both
CLEANING_SECONDS = 5.0  # that a command may take to clean up
FLUSHING_SECONDS = 1.0  # that a full pipe may hold up the end
ERASE = "\r\x1b[2K"  # clears a terminal's live line

_is_cleaning = False
_arrived = 0  # the signal that has arrived; 0: none
_code: int | None = None  # of a program that is about to exit
_is_launched = False
_saving: object = None  # the handler of a loop that saves
_farewell: Callable[[int], None] | None = None
_note: Callable[[int], None] | None = None
_is_ending = threading.Lock()


@contextmanager
def heard(until_exit: bool = False) -> Iterator[None]:
    """Lets COMMANDS and WARNINGS end the process inside; `until_exit` extends that to the exit.

    A signal that other code has taken over, or that is ignored, is left alone.
    """
    global _arrived, _code, _farewell
    defaults: dict[int, Any] = dict.fromkeys((*COMMANDS, *WARNINGS), signal.SIG_DFL)
    defaults[signal.SIGINT] = signal.default_int_handler
    taken = [number for number, default in defaults.items() if signal.getsignal(number) == default]
    if threading.current_thread() is not threading.main_thread():
        taken = []
    if not taken:
        yield
        return
    _arrived, _code, _farewell = 0, None, None
    wakeup, notify = os.pipe()
    os.set_blocking(notify, False)
    before = signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    for number in taken:
        signal.signal(number, _on_signal)
    listener = threading.Thread(target=_listen, args=(wakeup,), name="signals", daemon=True)
    listener.start()
    if until_exit and signal.SIGINT in taken:
        # During Python's final shutdown, which lasts a moment, the signal would have its default
        # again.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if not until_exit:
            for number in taken:
                signal.signal(number, defaults[number])
            signal.set_wakeup_fd(before)
            os.close(notify)  # which ends the thread
            listener.join()


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Turns the first signal into KeyboardInterrupt, so that temporary files can be removed."""
    global _is_cleaning
    before = sys.unraisablehook
    # An interrupted callback prints nothing: the command is ending.
    sys.unraisablehook = lambda error: None if _arrived else before(error)
    _is_cleaning = True
    try:
        yield
    finally:
        _is_cleaning = False
        sys.unraisablehook = before


def is_free(number: int) -> bool:
    """Returns True if the signal has its default handler and is not ignored."""
    return signal.getsignal(number) in (signal.SIG_DFL, _on_signal)


def launched() -> None:
    """Notes that a launcher watches this process and forwards the signals that it receives."""
    global _is_launched
    _is_launched = True


class Requests:
    """The requests to end. The second one is more urgent than the first.

    A scheduler signals all processes of a job, launchers included, and a launcher forwards the
    signal: whatever reaches a launched process within HANDED_ON_SECONDS is one request.
    """

    def __init__(self):
        self._first: float | None = None

    def is_second(self) -> bool:
        """Counts a request. Returns True if it is not the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return not _is_launched or now - self._first > HANDED_ON_SECONDS


def saves_first(handler: object) -> None:
    """Notes that `handler`, while it is installed, responds to the first signal by saving."""
    global _saving
    _saving = handler


def at_the_end(farewell: Callable[[int], None]) -> None:
    """Calls `farewell` with the exit code before a signal ends the process."""
    global _farewell
    _farewell = farewell


@contextmanager
def noted(note: Callable[[int], None]) -> Iterator[None]:
    """Calls `note` with the exit code if another thread ends the process while inside."""
    global _note
    before, _note = _note, note
    try:
        yield
    finally:
        _note = before


def note_end(code: int) -> None:
    """Notes that this process ends now with `code`: no `finally` of its main thread runs."""
    global _note
    note, _note = _note, None
    if note:
        with suppress(Exception):  # a full disk, say: the process ends all the same
            note(code)


def has_arrived() -> bool:
    """Returns True if a signal that ends the command has arrived."""
    return bool(_arrived)


def is_over(code: int) -> None:
    """Notes that the program is about to exit with `code`, which signals no longer change."""
    global _code
    _code = code


def say(number: int = 0) -> int:
    """Prints once that a signal (default: SIGINT) ended the command; returns the exit code."""
    number = number or _arrived or signal.SIGINT
    erase = ERASE if os.isatty(2) else ""
    how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    with suppress(OSError):
        os.write(2, f"{erase}spmdtrain: {how}\n".encode())
    return 128 + number  # as a shell reports a program ended by a signal


def end(number: int) -> None:
    """Ends the process immediately, with one line."""
    if not _is_ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is ending it
    try:
        words = threading.Thread(target=_say_and_flush, args=(number,), daemon=True)
        words.start()
        words.join(FLUSHING_SECONDS)
        note_end(128 + number)
        if _farewell:
            _farewell(128 + number)
        os._exit(128 + number)
    finally:
        _is_ending.release()


def _say_and_flush(number: int) -> None:
    say(number)
    with suppress(OSError, ValueError):
        sys.stdout.flush()


def _on_signal(number: int, _frame: object) -> None:
    """Handles a signal in the main thread; otherwise the listening thread does."""
    global _arrived
    if _is_cleaning and not _arrived:
        _arrived = number
        raise KeyboardInterrupt


def _listen(wakeup: int) -> None:
    requests = Requests()  # that arrived while a loop saves
    while bytes_read := os.read(wakeup, 1):
        number = bytes_read[0]
        handler = signal.getsignal(number)
        if handler is _on_signal:
            if _code is not None:
                os._exit(_code)
            if _is_cleaning or _arrived:
                ready, _, _ = select.select([wakeup], [], [], CLEANING_SECONDS)
                if ready and not os.read(wakeup, 1):  # the command has cleaned up
                    break
                if _code is not None:
                    os._exit(_code)
            end(number)
        elif number in COMMANDS and handler == _saving and requests.is_second():
            end(number)
    os.close(wakeup)
