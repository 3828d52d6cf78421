"""Gives libraries a path without special characters, whatever the folder's name.

Orbax finds its files with a glob over the whole path, in which `[1e-3]` is a pattern. tensorstore
takes `\\` for a separator and a segment like `gs:` for a bucket, and rejects bytes that are not
UTF-8. On Linux an open folder has a second name, made of digits alone, in /proc/self/fd.
"""

import os
import re
from pathlib import Path

from spmdtrain.config.errors import StorageError

# Paths made only of these characters are passed on unchanged.
PLAIN = re.compile(r"[A-Za-z0-9_./=+,@ -]*")
OPEN_FOLDERS = Path("/proc/self/fd")


class PlainPath:
    """The existing folder `path`, under a name that any library reads literally.

    `path` is that name until it is closed. Raises StorageError if the folder needs a second name
    and the system has none.
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
        """Releases the name; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
