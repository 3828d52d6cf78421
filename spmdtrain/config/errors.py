"""Errors that a person can mend, in one line: what was asked, what is there, what to type next.

Every error that is the user's carries the exit code under which the command line ends
(docs/exit_codes.md). Errors that are ours stay ordinary exceptions with a traceback.
"""

from typing import Any

LONGEST_PART = 1500  # characters of what, asked, found or try


class UserError(ValueError):
    """An error in one line: `what; asked ...; found ...; try ...`, parts left out if empty.

    Subclasses say which exit code it has.
    """

    exit_code = 1

    def __init__(self, what: str, *, asked: str = "", found: str = "", fix: str = ""):
        self.what = what
        parts = [what]
        if asked:
            parts.append(f"asked {asked}")
        if found:
            parts.append(f"found {found}")
        if fix:
            parts.append(f"try {fix}")
        super().__init__("; ".join(_one_line(part) for part in parts))


def _one_line(part: str) -> str:
    """One line of a length that a person reads: what was typed may be a megabyte."""
    line = " ".join(part.split())
    if not line.isprintable():  # what moves a terminal's cursor, or writes backwards
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    if len(line) <= LONGEST_PART:
        return line
    return f"{line[: LONGEST_PART - 200]} ... {line[-195:]}"


class ConfigError(UserError):
    """The settings, the command line or the mesh cannot be obeyed."""

    exit_code = 4


class DataError(UserError):
    """The corpus, the tokenizer or a token file is missing or wrong."""

    exit_code = 5


class CheckpointError(UserError):
    """The run directory holds no checkpoint that this run can go on from."""

    exit_code = 6


class DamagedError(CheckpointError):
    """A checkpoint is not as it was saved: bits have changed, or files are missing."""


class UnfitError(CheckpointError):
    """A checkpoint holds other weights, or other state of an optimizer, than the run wants."""

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
    """The loss is not a number any more."""

    exit_code = 9


class StorageError(UserError):
    """The run directory cannot be written."""

    exit_code = 10


class CorruptedError(UserError):
    """A device holds other bits than the devices that hold copies of the same array."""

    exit_code = 11


DONE = 0
# Not an error: the run was asked to stop, saved, and can be resumed.
PREEMPTED = 3
