"""Writes the files that a command's options name."""

import os
from pathlib import Path

from spmdtrain.config import StorageError


def refuse_unwritable(path: Path) -> None:
    """Raises StorageError for a path that cannot be written, and leaves it unchanged."""
    existed = os.path.lexists(path)
    try:
        # A pipe without a reader is refused; without the flag, opening it would wait for one.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def write_picture(path: str, svg: str) -> None:
    """Writes an SVG. Raises StorageError if the path cannot be written."""
    refuse_unwritable(Path(path))
    try:
        Path(path).write_text(svg, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None
