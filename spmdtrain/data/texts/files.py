"""Finds the files that paths and globs name."""

import difflib
import glob
import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.data.texts.other_kinds import LOOKED_AT, refuse_other_kinds

# The number of a folder's files that a message lists.
LISTED = 5


def find_files(patterns: Iterable[str]) -> list[str]:
    """Returns the files named by paths and globs (including `**`).

    Patterns keep their order; the files of one glob are sorted.

    Raises DataError for a pattern that matches nothing or is a folder, and for a file named twice.
    Repeating a file could put training text into the validation tail; to weight a text more, use
    `[[data.mix]]`.
    """
    path_of: dict[str | tuple[int, int], str] = {}  # file -> the path that names it
    for pattern in patterns:
        for path in _matches(pattern):
            real = identity_of(path)
            if real in path_of:
                raise DataError(
                    f"{path} is named twice",
                    fix="naming it once; [[data.mix]] takes more of one source than of another",
                )
            path_of[real] = path
    return list(path_of.values())


def identity_of(path: str) -> str | tuple[int, int]:
    """Returns a key that is the same for all names of a file, including hard and soft links."""
    status = os.stat(path)
    # Some network file systems have no inode numbers.
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def _matches(pattern: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    if os.path.isdir(expanded):
        fix = os.path.join(pattern, "**", "*.txt")
        raise DataError(f"{pattern} is a folder", fix=fix)
    if os.path.isfile(expanded):  # even if its name looks like a glob
        return [expanded]
    if os.path.exists(expanded):  # e.g. a pipe, which would block its reader
        raise DataError(f"{pattern} is not a regular file")
    matches = sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
    if not matches:
        raise _no_match(pattern, expanded)
    return matches


def _no_match(pattern: str, path: str) -> DataError:
    """Returns the error for a pattern without files, with a similar name or the folder's files."""
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return DataError(f"no file matches {pattern}", found=f"no folder {folder}")
    stem, ending = os.path.splitext(name)
    alike = {}  # stem -> name of a file with the same ending
    for other in sorted(os.listdir(folder or ".")):
        other_stem, other_ending = os.path.splitext(other)
        if other_ending == ending and not other.startswith("."):
            alike[other_stem] = other
    near = difflib.get_close_matches(stem, alike, 1)
    if near:
        return DataError(f"no file matches {pattern}", fix=os.path.join(folder, alike[near[0]]))
    names = list(alike.values())
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return DataError(f"no file matches {pattern}", found=listed)


def read_text(path: str) -> str:
    """Returns the text of a UTF-8 file, line ends untouched. Raises DataError if unreadable."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    refuse_other_kinds(content[:LOOKED_AT], path)
    return decode(content, path)


def decode(content: bytes, path: str, offset: int = 0) -> str:
    """Returns the UTF-8 text of bytes found at `offset` in the file `path`.

    Raises DataError, naming both, if they are not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte {content[error.start]:#04x} at offset {offset + error.start}"
        raise DataError(f"{path} is not UTF-8 text: {wrong}") from None


def read_json(path: str) -> Any:
    """Returns the JSON value in a file. Raises DataError if it is not JSON."""
    return parse_json(read_text(path), path, "JSON")


def parse_json(content: str | bytes, where: str, wanted: str) -> Any:
    """Returns the value of JSON text; `where` names it and `wanted` describes it in errors.

    Raises DataError if it is not JSON, or if Python cannot read it: nested thousands deep, or with
    an integer of thousands of digits.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise DataError(f"{where} is not {wanted}: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        wrong = f"not UTF-8 at byte {error.start}"
        raise DataError(f"{where} is not {wanted}: {wrong}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not {wanted}: {error}") from None
    except ValueError:
        raise DataError(f"{where} is not {wanted}: an integer has too many digits") from None


def import_for(name: str, path: str) -> Any:
    """Imports a package of the extra `data` that `path` needs. Raises DataError if missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise DataError(
            f"{path} needs the package `{package}`, which is not installed",
            fix="pip install 'spmdtrain[data]'",
        ) from None
