"""Runs one command to its end: arguments in, exit code out."""

import errno
import io
import os
import sys
from collections.abc import Sequence

from spmdtrain.cli.addresses import refuse_addresses
from spmdtrain.cli.parser import COMMANDS, make_parser
from spmdtrain.cli.typable import make_typable
from spmdtrain.config import StorageError, UserError
from spmdtrain.config.errors import OwnCodeError
from spmdtrain.config.named_code import own_errors_named, traceback_of
from spmdtrain.processes import peers, signals

CLOSED_PIPE = 141  # as a shell reports a program that SIGPIPE ended
# Errors for which a path or a disk is to blame, wherever it was named. For paths that are likely to
# be wrong, the commands have better messages.
OF_THE_PATH = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENXIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
)

# Errors of standard output: no reader, no room, a file that is open only for reading.
OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def run(arguments: Sequence[str] | None) -> int:
    """Runs one command and returns its exit code.

    A user's mistake is one line on stderr; only our bugs, and errors of code that a setting names,
    show a traceback.
    """
    signals.at_the_end(lambda code: peers.leave(code, "failed interrupted"))
    try:
        return _run(arguments)
    except BaseException as error:
        # After a signal, any error is due to it: an import may have turned it into another one.
        if not isinstance(error, KeyboardInterrupt) and not signals.has_arrived():
            raise
        code = signals.say()
        peers.leave(code, "failed interrupted")
        return code


def _run(arguments: Sequence[str] | None) -> int:
    _escape_unencodable()
    parsed = None
    try:
        _check_working_directory()
        words = sys.argv[1:] if arguments is None else arguments
        chosen = words[0] if words and words[0] in COMMANDS else None
        parsed = make_parser(chosen).parse_args(words)
        refuse_addresses(parsed)
        with own_errors_named():
            code = parsed.command(parsed)
        print(end="", flush=True)  # finds here an output that cannot be written
        return code
    except UserError as error:
        if parsed is not None:
            make_typable(error, parsed)
        return _end_with(error)
    except OSError as error:
        if error.filename and error.errno in OF_THE_PATH:
            return _end_with(StorageError(f"{error.filename!r:.80}: {error.strerror}"))
        if error.errno not in OF_OUTPUT or error.filename:
            raise
        if error.errno != errno.EPIPE and _takes_output():
            return _end_with(StorageError(f"cannot write: {error.strerror}"))
        # Standard output takes no more. At exit Python would flush it again, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # `| head`: the reader has left, which is no mistake
            peers.leave(CLOSED_PIPE, "failed nobody reads its output")
            return CLOSED_PIPE
        return _end_with(StorageError(f"cannot write to standard output: {error.strerror}"))


def _takes_output() -> bool:
    """Returns False if standard output does not accept even a line break.

    Output that could not be written may be gone from the buffer, so a flush alone finds nothing.
    """
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _check_working_directory() -> None:
    """Refuses a working directory that has been removed: no path can be resolved from it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        fix = "cd to an existing one"
        raise StorageError("the working directory is gone", fix=fix) from None


def _escape_unencodable() -> None:
    """Makes output escape characters that the encoding of a terminal or log lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_with(error: UserError) -> int:
    if isinstance(error, OwnCodeError):
        print(traceback_of(error), end="", file=sys.stderr)  # for the author of that code
    peers.end(error)  # does not return if there are other processes
    print(f"spmdtrain: {error}", file=sys.stderr)
    return error.exit_code
