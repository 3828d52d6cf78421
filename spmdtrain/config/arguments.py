"""Checks the arguments of the Python API: returns the value, or raises one line that names it.

Public functions call these first, before anything is read, compiled or written. No jax, no numpy.
"""

import math
import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from spmdtrain.config.errors import ConfigError

T = TypeVar("T")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
LARGEST = 2**63 - 1  # of a number stored in 64 bits


def shown(value: Any) -> str:
    """Returns a value for a message: shortened, and an array as its dtype and shape."""
    if hasattr(value, "dtype") and getattr(value, "shape", ()) != ():
        return f"{value.dtype}{list(value.shape)}"
    try:
        text = str(value) if hasattr(value, "dtype") else repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_path(value: Any, name: str) -> Path:
    """Returns a path given as text or as a Path.

    Raises ConfigError if it is not a path, or is the address of a store.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise ConfigError(f"{name}={shown(value)} is not a path", fix="a str or a pathlib.Path")
    text = os.fspath(value)
    if not text or "\0" in text:
        raise ConfigError(
            f"{name}={shown(text)} is not a path", fix="'.' for the working directory"
        )
    refuse_address(text, f"{name}=")
    return Path(text)


def refuse_address(text: str, named: str = "") -> None:
    """Raises ConfigError for an address such as gs://bucket/run, where a file or folder belongs.

    It would become a folder called `gs:` in the working directory. `named` is put before the
    address in the message.
    """
    if ADDRESS.match(text):
        raise ConfigError(
            f"{named}{text:.200} is an address, and this is in a folder",
            fix="a folder, e.g. of a mount",
        )


def as_run(value: Any, name: str) -> Path:
    """Returns the path of a run directory, like `as_path`."""
    text = str(as_path(value, name))
    return Path(re.sub("^/+", "/", text))  # no library accepts //folder


def as_texts(value: Any, name: str, example: str) -> tuple[str, ...]:
    """Returns a list of strings or paths as strings. Raises ConfigError for anything else.

    A single string is refused: it would be read letter by letter.
    """
    fix = f"{name}=[{example!r}]"
    if isinstance(value, str | bytes | os.PathLike):
        raise ConfigError(f"{name}={shown(value)} is one text, not a list of them", fix=fix)
    try:
        items = None if isinstance(value, Mapping) else tuple(value)
    except TypeError:
        items = None
    if items is None:
        raise ConfigError(f"{name}={shown(value)} is not a list of texts", fix=fix)
    for item in items:
        if not isinstance(item, str | os.PathLike) or not isinstance(os.fspath(item), str):
            raise ConfigError(f"{name} has {shown(item)}, which is not a text", fix=fix)
    return tuple(os.fspath(item) for item in items)


def as_whole(value: Any, name: str, least: int, largest: int = LARGEST) -> int:
    """Returns a whole number from `least` to `largest` as an int.

    It may be a numpy or jax scalar. Raises ConfigError for anything else, including a bool.
    """
    try:
        number = None if _is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= largest:
        raise ConfigError(
            f"{name}={shown(value)} is not a whole number from {least} to {largest}",
            fix=f"{name}={least}",
        )
    return number


def as_step(value: Any) -> int | None:
    """Returns the requested step as an int, or None if it is None. Raises ConfigError otherwise.

    Whether that step has a checkpoint is checked elsewhere.
    """
    if value is None:
        return None
    try:
        number = None if _is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ConfigError(f"step={shown(value)} is not a whole number", fix="step=None, the newest")
    return number


def as_number(value: Any, name: str, least: float) -> float:
    """Returns a finite number of at least `least`, which may be a numpy or jax scalar.

    Raises ConfigError for anything else.
    """
    is_scalar = getattr(value, "shape", ()) == () and hasattr(type(value), "__float__")
    try:
        number = float(value) if is_scalar and not _is_bool(value) else math.nan
    except (TypeError, OverflowError):
        number = math.nan
    if not least <= number < math.inf:
        raise ConfigError(f"{name}={shown(value)} is not a number of at least {least:g}")
    return number


def as_flag(value: Any, name: str) -> bool:
    """Returns a bool, which may be numpy's.

    Raises ConfigError for others: "no" would count as true.
    """
    if not _is_bool(value) or getattr(value, "shape", ()) != ():
        raise ConfigError(f"{name}={shown(value)} is neither True nor False")
    return bool(value)


def check_kind(value: Any, kind: type[T] | tuple[type, ...], name: str, fix: str) -> None:
    """Raises ConfigError if a value is not an instance of `kind`. `fix` says how to get one."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(one.__name__ for one in kinds)
        raise ConfigError(f"{name}= takes a {wanted}", found=type(value).__name__, fix=fix)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
