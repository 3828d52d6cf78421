"""Say how much of files has been read, where nobody watches a terminal."""

import sys
from collections.abc import Callable

LINES = 10  # that are printed until all is read


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
