"""Reads a small file that a user names. An endless one is refused, not waited for."""

import errno
import os
import stat
from pathlib import Path

LARGEST = 16 * 2**20  # bytes
AGAIN = "downloading it again"  # the remedy for a published file that is damaged


def read_named(path: str | Path, largest: int = LARGEST) -> bytes:
    """Returns the bytes of a regular file, or of a shell's <(...).

    Raises OSError for everything else: an open pipe, a terminal and /dev/zero have no end.
    """
    mode = os.stat(path).st_mode
    of_shell = stat.S_ISFIFO(mode) and str(path).startswith(("/dev/", "/proc/"))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(mode) and not of_shell:
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(path))
    with open(path, "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it is larger than {largest / 2**20:.0f} MiB", str(path))
    return content
