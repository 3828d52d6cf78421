"""Turns failures to write files into errors of one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from spmdtrain.config.errors import StorageError


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns an OSError of the file work inside into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from None
