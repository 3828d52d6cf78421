"""Handles standard streams that are missing at the start, or that have lost their reader.

A run continues when its output loses its reader: `| head`, or a closed terminal.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator

STANDARD_ERROR = 2


class _Remarks(io.TextIOWrapper):
    """A standard error that drops messages it cannot write, so that the command is not affected."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def open_missing() -> None:
    """Opens the standard streams that the program was started without (`>&-`, a service, cron).

    Otherwise the next file opened would get their number, and a library's prints would land in it.
    """
    for number in range(3):
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    raw = open(2, "wb", closefd=False)  # noqa: SIM115
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    sys.stderr = _Remarks(raw, encoding, "backslashreplace", line_buffering=True)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def drop_closed() -> bool:
    """Redirects outputs without a reader to /dev/null. Returns True if there were any."""
    closed = [number for number in (_output(), STANDARD_ERROR) if _is_closed(number)]
    for number in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(closed)


@contextlib.contextmanager
def tolerated() -> Iterator[None]:
    """Ignores errors of writing to an output that lost its reader; raises all others."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO) or not drop_closed():
            raise


def _output() -> int:
    """Returns the file descriptor to which the program prints: see native_output.py."""
    with contextlib.suppress(OSError, ValueError):  # replaced by a caller, or closed
        return sys.stdout.fileno()
    return 1


def _is_closed(number: int) -> bool:
    """Returns True if this is a pipe without a reader or a terminal that has hung up."""
    poll = select.poll()
    poll.register(number, 0)
    closed = select.POLLERR | select.POLLHUP
    return any(event & closed and not event & select.POLLNVAL for _, event in poll.poll(0))
