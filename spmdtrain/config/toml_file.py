"""Reads a TOML file that a user names. A missing or malformed file is a one-line error.

Python's reader recurses once per bracket and takes time quadratic in a key's length, so both are
bounded before it starts.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.named_file import read_named
from spmdtrain.config.near import nearest

DEEPEST = 64  # tables or lists inside each other, and parts of a key
MOST_EXTENDED = 32  # files, each of which `extends` the next

STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' + r"'''.*?'''|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'|#[^\n]*",
    re.S,
)
# Possessive: a match is never tried again letter by letter.
LONG_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:\s*+\.\s*+[\w-]++){{{DEEPEST},}}")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Returns the table of a TOML file. `what` names it in errors, e.g. "config file x.toml".

    Raises ConfigError for a file that cannot be read or is not TOML.
    """
    try:
        content = read_named(path)
    except FileNotFoundError:
        names = sorted(file.name for file in path.parent.glob("*.toml"))
        close = nearest(path.name, names)
        raise ConfigError(
            f"there is no {what}",
            found=", ".join(names) or f"no TOML file in {path.parent}",
            fix=str(path.with_name(close)) if close else "",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be read: {error.strerror}", fix="the TOML file of a run"
        ) from None
    try:
        return parse_toml(content.decode("utf-8-sig"))  # with Windows' byte order mark
    except ValueError as error:  # also for text that is not UTF-8, and a number of 5,000 digits
        raise ConfigError(f"{what} is not TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the table of a text. Raises ValueError if it is not TOML, or too deep."""
    bare = STRING_OR_COMMENT.sub("s", text)
    if LONG_KEY.search(bare):
        raise ValueError(f"a key of more than {DEEPEST} parts")
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", bare):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets inside each other")
    return tomllib.loads(text)
