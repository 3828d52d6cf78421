"""The command line: arguments in, exit code out.

`--help` and a typo must not wait for jax, so each command imports what it needs once it has its
settings. This file imports nothing else until Ctrl-C is certain to end in one line.
"""

from collections.abc import Sequence

from spmdtrain.processes import closed_outputs, signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (default: sys.argv, ending the program) and returns its exit code."""
    is_program = arguments is None
    if is_program:
        closed_outputs.open_missing()
    with signals.heard(until_exit=is_program):
        from spmdtrain.cli import command
        from spmdtrain.processes import clocks

        if is_program:
            clocks.program_begins()

        code = command.run(arguments)
        if is_program:
            signals.is_over(code)
        return code
