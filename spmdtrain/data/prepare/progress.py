"""Say how much of files has been read, where nobody watches a terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINES = 10  # that are printed until all is read
SILENCE = 5.0  # seconds from one look at long work to the next


def plain_lines(total: int) -> Callable[[int, str], None]:
    """Return `say(bytes read so far, what else to say)`, which prints about ten lines in all.

    `total` is the size of the files in bytes. The lines go to standard error.
    """
    printed = 0  # tenths

    def say(read: int, more: str) -> None:
        nonlocal printed
        if read * LINES // max(total, 1) > printed:
            printed = read * LINES // total
            print(f"{100 * read // total}% of {total:,} bytes{more}", file=sys.stderr, flush=True)

    return say


@contextmanager
def heartbeat(state: Callable[[], str]) -> Iterator[None]:
    """Print `state()` and the time now and then, as long as it has not changed between two looks.

    So a document that takes minutes leaves lines too. They go to standard error.
    """
    began = time.monotonic()
    is_done = threading.Event()

    def watch() -> None:
        seen = state()
        while not is_done.wait(SILENCE):
            now = state()
            if now == seen:
                seconds = time.monotonic() - began
                print(f"{now}, {seconds:.0f} s: still at work", file=sys.stderr, flush=True)
            seen = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
