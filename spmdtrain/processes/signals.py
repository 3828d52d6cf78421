"""Ends a command at any moment on a signal that asks for it: one line, and code 128 + its number.

These are SIGINT (Ctrl-C) and SIGTERM, the early warnings of schedulers, SIGUSR1 and SIGUSR2, and
SIGHUP of a terminal that is closed.

Python itself would raise KeyboardInterrupt wherever its main thread happens to be: in an import,
which turns it into another error, in a callback, which prints and forgets it, or not before a
compilation is over. So a thread hears of the signal, and ends the process at once.

Two end otherwise. A command with files to clean up gets the exception (`cleaning_up`). The loop
takes the signals over and saves first (running/guards/interrupt.py); the second one ends it at
once, also while its main thread waits for devices.

This file imports little and nothing of ours: until it is at work, Ctrl-C shows a traceback.
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
HANDED_ON_SECONDS = 2.0  # in which a launcher hands on what a scheduler has sent to both of them
CLEANING_SECONDS = 5.0  # that a command may take to clean up
FLUSHING_SECONDS = 1.0  # that a full pipe may hold up the end
ERASE = "\r\x1b[2K"  # of a terminal's live line

_is_cleaning = False
_asked = 0  # the signal that has come; 0: none
_code: int | None = None  # of a program that is about to exit
_is_launched = False
_saving: object = None  # the handler of a loop, which saves
_farewell: Callable[[int], None] | None = None
_is_ending = threading.Lock()


@contextmanager
def heard(until_exit: bool = False) -> Iterator[None]:
    """Inside, COMMANDS and WARNINGS end the process; so do they afterwards if it is to exit then.

    A signal that somebody else has taken over, or that is ignored, is left alone.
    """
    global _asked, _code, _farewell
    defaults: dict[int, Any] = dict.fromkeys((*COMMANDS, *WARNINGS), signal.SIG_DFL)
    defaults[signal.SIGINT] = signal.default_int_handler
    taken = [number for number, default in defaults.items() if signal.getsignal(number) == default]
    if threading.current_thread() is not threading.main_thread():
        taken = []
    if not taken:
        yield
        return
    _asked, _code, _farewell = 0, None, None
    listened, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in taken:
        signal.signal(number, _on_signal)
    listener = threading.Thread(target=_listen, args=(listened,), name="signals", daemon=True)
    listener.start()
    if until_exit and signal.SIGINT in taken:
        # Python's very end, which lasts a moment, would give the signal its default again.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if not until_exit:
            for number in taken:
                signal.signal(number, defaults[number])
            signal.set_wakeup_fd(before)
            os.close(told)  # which ends the thread
            listener.join()


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Inside, the first signal raises KeyboardInterrupt, for what must not be left lying about."""
    global _is_cleaning
    before = sys.unraisablehook
    # A callback that is interrupted says nothing: the command ends.
    sys.unraisablehook = lambda told: None if _asked else before(told)
    _is_cleaning = True
    try:
        yield
    finally:
        _is_cleaning = False
        sys.unraisablehook = before


def is_free(number: int) -> bool:
    """True where nobody has taken the signal over, and it is not ignored."""
    return signal.getsignal(number) in (signal.SIG_DFL, _on_signal)


def launched() -> None:
    """Says that a launcher watches this process: it hands on what it is sent itself."""
    global _is_launched
    _is_launched = True


class Requests:
    """Tells the second request to end from the first one.

    A scheduler sends a signal to all processes of a job, launchers included, and a launcher hands
    it on: what comes to a launched process within HANDED_ON_SECONDS is one request.
    """

    def __init__(self):
        self._first: float | None = None

    def is_second(self) -> bool:
        """Counts a request that has come; True if it is not the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return not _is_launched or now - self._first > HANDED_ON_SECONDS


def saves_first(handler: object) -> None:
    """Says that `handler`, while it is installed, answers the first signal by saving."""
    global _saving
    _saving = handler


def at_the_end(farewell: Callable[[int], None]) -> None:
    """Calls `farewell` with the exit code before a signal ends the process."""
    global _farewell
    _farewell = farewell


def asked() -> bool:
    """True where a signal has come that ends the command."""
    return bool(_asked)


def is_over(code: int) -> None:
    """Says that the program is about to exit with `code`, which a signal changes no more."""
    global _code
    _code = code


def say(number: int = 0) -> int:
    """Says once that the command was ended by a signal, SIGINT unless told; returns the code."""
    number = number or _asked or signal.SIGINT
    erase = ERASE if os.isatty(2) else ""
    how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    with suppress(OSError):
        os.write(2, f"{erase}spmdtrain: {how}\n".encode())
    return 128 + number  # as a shell reports a program that a signal has ended


def end(number: int) -> None:
    """Ends the process at once, with one line."""
    if not _is_ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    try:
        words = threading.Thread(target=_say_and_flush, args=(number,), daemon=True)
        words.start()
        words.join(FLUSHING_SECONDS)
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
    """What becomes of a signal in the main thread; else it is for the thread that listens."""
    global _asked
    if _is_cleaning and not _asked:
        _asked = number
        raise KeyboardInterrupt


def _listen(listened: int) -> None:
    requests = Requests()  # that came while a loop saves
    while told := os.read(listened, 1):
        number = told[0]
        handler = signal.getsignal(number)
        if handler is _on_signal:
            if _code is not None:
                os._exit(_code)
            if _is_cleaning or _asked:
                ready, _, _ = select.select([listened], [], [], CLEANING_SECONDS)
                if ready and not os.read(listened, 1):  # the command has cleaned up
                    break
                if _code is not None:
                    os._exit(_code)
            end(number)
        elif number in COMMANDS and handler == _saving and requests.is_second():
            end(number)
    os.close(listened)
