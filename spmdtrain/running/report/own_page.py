"""Writes a run's page about itself, RUN/report.html, at its end and, if asked, as it goes."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import jax

from spmdtrain.config.errors import UserError
from spmdtrain.config.run_files import REPORT
from spmdtrain.lab.page.page import page, write
from spmdtrain.lab.page.read import RunReader

LIVE_SECONDS = 30


@contextlib.contextmanager
def own_page(directory: Path, *, is_live: bool) -> Iterator[None]:
    """Writes the page of the run in `directory` when the work inside is over.

    If it `is_live`, a thread writes it meanwhile, too. Raises StorageError if it cannot be written,
    unless the run has failed by itself.
    """
    if jax.process_index() > 0:
        yield
        return
    reader = RunReader(directory)
    is_over = threading.Event()
    thread = threading.Thread(target=_keep_writing, args=(reader, directory, is_over), daemon=True)
    if is_live:
        thread.start()
    try:
        yield
    except BaseException:
        _end(thread, is_over)
        with contextlib.suppress(Exception):  # the error that ended the run is the one to report
            write(directory / REPORT, page([reader.read()]))
        raise
    _end(thread, is_over)
    write(directory / REPORT, page([reader.read()]))


def _end(thread: threading.Thread, is_over: threading.Event) -> None:
    is_over.set()
    if thread.is_alive():
        thread.join()


def _keep_writing(reader: RunReader, directory: Path, is_over: threading.Event) -> None:
    while not is_over.wait(LIVE_SECONDS):
        text = page([reader.read()], reload_seconds=LIVE_SECONDS)
        with contextlib.suppress(UserError):  # a full disk ends the run by itself
            write(directory / REPORT, text)
