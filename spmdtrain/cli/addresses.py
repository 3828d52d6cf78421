"""Refuses addresses of stores in the place of files and folders, for all commands at once.

Every argument is taken for a path, except those named here, so that none can be forgotten.
"""

import argparse
from collections.abc import Iterator

from spmdtrain.config.arguments import refuse_address

# Arguments that are texts, names, settings (which are checked elsewhere) or other commands.
NO_PATHS = frozenset(
    {
        *("set", "chat_set", "command_line"),
        *("prompt", "chat", "stop", "template", "split_on", "special"),
        *("end_of_text", "begin_of_text", "coordinator", "make", "own", "sweep"),
        *("options", "settable"),  # of the parser itself
    }
)


def refuse_addresses(parsed: argparse.Namespace) -> None:
    """Raises ConfigError for an argument that is an address, and would become a folder."""
    for name, text in _texts(parsed):
        option = f"--{name.replace('_', '-')}"
        refuse_address(text, f"{option} " if option in parsed.options else "")


def _texts(parsed: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each argument that may be a path."""
    for name, value in vars(parsed).items():
        if name in NO_PATHS:
            continue
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                yield name, text
