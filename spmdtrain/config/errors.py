"""Errors that a user can fix, in one line: what was asked, what was found, what to type next.

Every user error carries the exit code with which the command line ends (docs/exit_codes.md). Our
own errors stay ordinary exceptions with a traceback.
"""

from typing import Any

LONGEST_PART = 1500  # characters of what, asked, found or try


class UserError(ValueError):
    """An error in one line: `what; asked ...; found ...; try ...`, without empty parts.

    Subclasses define the exit code.
    """

    exit_code = 1

    def __init__(self, what: str, *, asked: str = "", found: str = "", fix: str = ""):
        self.what = what
        self.fix = fix
        parts = [what]
        if asked:
            parts.append(f"asked {asked}")
        if found:
            parts.append(f"found {found}")
        if fix:
            parts.append(f"try {fix}")
        super().__init__("; ".join(_one_line(part) for part in parts))

    def propose(self, fix: str) -> None:
        """Replaces the remedy that the error suggests."""
        line = str(self)
        without_fix = line.removesuffix(f"; {_one_line(f'try {self.fix}')}") if self.fix else line
        self.fix = fix
        self.args = (f"{without_fix}; {_one_line(f'try {fix}')}",)


def _one_line(part: str) -> str:
    """Returns the text as one line of readable length: a user may have typed a megabyte."""
    line = " ".join(part.split())
    if not line.isprintable():  # it would move a terminal's cursor, or write backwards
        line = "".join(
            character if character.isprintable() else ascii(character)[1:-1] for character in line
        )
    if len(line) <= LONGEST_PART:
        return line
    return f"{line[: LONGEST_PART - 200]} ... {line[-195:]}"


class ConfigError(UserError):
    """The settings, the command line or the mesh cannot be obeyed."""

    exit_code = 4


class OwnCodeError(ConfigError):
    """Code that a setting names has raised an error, which is the cause of this one.

    The command line shows the traceback of that error before the line.
    """


class DataError(UserError):
    """The corpus, the tokenizer or a token file is missing or wrong."""

    exit_code = 5


class CheckpointError(UserError):
    """The run directory holds no checkpoint from which this run can continue."""

    exit_code = 6


class DamagedError(CheckpointError):
    """A checkpoint is damaged: bits have changed, or files are missing."""


class UnfitError(CheckpointError):
    """A checkpoint holds other weights or optimizer state than the run needs."""

    def __init__(self, what: str, *, asked: str, found: str, fix: str, meta: dict[str, Any]):
        super().__init__(what, asked=asked, found=found, fix=fix)
        self.meta = meta


class HangError(UserError):
    """A process of the run was silent for longer than its phase may take."""

    exit_code = 7


class PeerLostError(UserError):
    """Another process of this run has failed or is gone."""

    exit_code = 8


class DivergedError(UserError):
    """The loss is no longer a number, or a step is bad and `[guard]` ends the run."""

    exit_code = 9


class StorageError(UserError):
    """The run directory cannot be written."""

    exit_code = 10


class CorruptedError(UserError):
    """A device's copy of an array differs, bit for bit, from the other devices' copies."""

    exit_code = 11


DONE = 0
# Not an error: the run was asked to stop, saved, and can be resumed.
PREEMPTED = 3
# Not an error either: a replay differs from the run that it repeats, or two compared runs differ.
UNEQUAL = 12
# Nor is this: a certificate was refused, because a layout trains a different model, or because two
# widths do not train alike.
REFUSED = 13
