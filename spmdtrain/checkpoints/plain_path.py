"""A name for a folder that no library misreads, whatever a person has called it.

Orbax looks for its files with a glob over the whole path, in which `[1e-3]` is a pattern, and
tensorstore takes `\\` for a separator, a segment like `gs:` for a bucket, and no bytes that are not
UTF-8. On Linux an open folder has a second name, of digits alone, in /proc/self/fd.
"""

import os
import re
from pathlib import Path

from spmdtrain.config.errors import StorageError

# Paths of these characters alone are handed on as they are.
PLAIN = re.compile(r"[A-Za-z0-9_./=+,@ -]*")
OPEN_FOLDERS = Path("/proc/self/fd")


class PlainPath:
    """The folder `path`, which is there, under a name that any library takes as it is meant.

    `path` is that name for as long as it is not closed. Raises StorageError where the folder needs
    a second name and the system has none.
    """

    def __init__(self, path: Path):
        self._descriptor: int | None = None
        self.path = path
        if PLAIN.fullmatch(str(path)):
            return
        if not OPEN_FOLDERS.is_dir():
            raise StorageError(
                f"{path} has characters that checkpoints cannot have in their path",
                fix="a --run of letters, digits and _ - . = +",
            )
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.path = OPEN_FOLDERS / str(self._descriptor)

    def close(self) -> None:
        """Gives the name up; it may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
