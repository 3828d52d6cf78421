"""A run goes on when nobody reads its output any more: `| head`, or a terminal that is closed."""

import contextlib
import errno
import os
import select
from collections.abc import Iterator

OUTPUTS = (1, 2)  # file descriptors of standard output and standard error


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
