"""The command line: arguments in, exit code out. jax is imported once a command has its settings, not for `--help`."""

import errno
import os
import sys
from collections.abc import Sequence

from spmdtrain.cli.arguments import make_parser
from spmdtrain.config import StorageError, UserError
from spmdtrain.parallel import peers

CLOSED_PIPE = 141  # as of a program that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. A person's mistake is one line on stderr and its exit code; only our bugs show a traceback."""
    try:
        parsed = make_parser().parse_args(arguments)
        code = parsed.command(parsed)
        print(end="", flush=True)
        return code
    except UserError as error:
        peers.end(error)
        print(f"spmdtrain: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again at its end
        if error.errno == errno.EPIPE:  # `| head`: nobody reads on, and nobody made a mistake
            peers.leave(CLOSED_PIPE, "failed nobody reads its output")
            return CLOSED_PIPE
        refused = StorageError(f"cannot write: {error.strerror}")
        peers.end(refused)
        print(f"spmdtrain: {refused}", file=sys.stderr)
        return refused.exit_code
    except KeyboardInterrupt:  # before the loop took over the signal: nothing to save yet
        peers.leave(130, "failed interrupted")
        return 130
