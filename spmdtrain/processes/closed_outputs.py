"""Standard streams that nobody reads, or that a program is started without.

A run goes on when nobody reads its output any more: `| head`, or a terminal that is closed.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator

OUTPUTS = (1, 2)  # file descriptors of standard output and standard error


class _Remarks(io.TextIOWrapper):
    """Standard error: a remark that cannot be written changes nothing of what a command does."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def complete() -> None:
    """Gives a program the standard streams that it is started without (`>&-`, a service, cron).

    The next file it opens would take their number, and what a library prints would go there.
    """
    for number in range(3):
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
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


def let_go() -> bool:
    """Sends the outputs that nobody reads any more to nowhere. Returns whether there was one."""
    closed = [number for number in OUTPUTS if _is_closed(number)]
    for number in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(closed)


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """Inside, what is printed may be lost where nobody reads it; any other error is raised."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO) or not let_go():
            raise


def _is_closed(number: int) -> bool:
    """True for a pipe without a reader and for a terminal that has hung up."""
    poll = select.poll()
    poll.register(number, 0)
    closed = select.POLLERR | select.POLLHUP
    return any(event & closed and not event & select.POLLNVAL for _, event in poll.poll(0))
