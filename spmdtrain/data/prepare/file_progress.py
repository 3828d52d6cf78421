"""Reports progress through files when there is no terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINES = 10  # printed in total
SILENCE = 5.0  # seconds between looks at long work


def plain_lines(total: int) -> Callable[[int, str], None]:
    """Returns `say(bytes read so far, extra text)`, which prints about ten lines in total.

    `total` is the total size of the files in bytes. Lines go to standard error.
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
    """Prints `state()` and the time at intervals while the state does not change.

    So a document that takes minutes still produces lines. They go to standard error.
    """
    began = time.monotonic()
    is_done = threading.Event()

    def watch() -> None:
        last = state()
        while not is_done.wait(SILENCE):
            now = state()
            if now == last:
                seconds = time.monotonic() - began
                print(f"{now}, {seconds:.0f} s: still at work", file=sys.stderr, flush=True)
            last = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
