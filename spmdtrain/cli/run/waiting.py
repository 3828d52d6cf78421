"""Shows that a command is working until it has a result."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from spmdtrain.cli.devices import start_jax
from spmdtrain.processes.scheduler import is_first
from spmdtrain.running.report import stages


@contextlib.contextmanager
def waiting(parsed: argparse.Namespace, stage: str) -> Iterator[None]:
    """Imports jax, and shows the command's stage to a person at a terminal."""
    watched = sys.stderr.isatty() and is_first(parsed.process)
    with stages.shown(sys.stderr, quiet=not watched):
        stages.enter("starting jax")
        start_jax(parsed)
        stages.enter(stage)
        yield
