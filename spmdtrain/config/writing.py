"""Turns failures to write files into errors of one line."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from spmdtrain.config.errors import StorageError


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns an OSError raised in the block into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def replacing(path: Path, spare: Path | None = None) -> Iterator[Path]:
    """Yields the file to write, which then replaces `path`: a reader sees the old or the new one.

    The file is `spare`, by default a hidden file next to `path` that no other process writes. It is
    removed if the block fails. Raises StorageError as `writing` does.
    """
    spare = spare or path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            yield spare
            spare.replace(path)
        finally:
            spare.unlink(missing_ok=True)
