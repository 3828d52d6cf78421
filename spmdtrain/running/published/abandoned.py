"""Sets exports aside whose steps the run has abandoned, so that nobody takes them for its own."""

import jax

from spmdtrain.checkpoints.files.quarantine import set_aside
from spmdtrain.config.errors import StorageError
from spmdtrain.config.run_files import EXPORTS, QUARANTINE
from spmdtrain.running.report.reporter import Reporter


def set_aside_exports(after: int, reporter: Reporter) -> None:
    """Moves the exports of steps later than `after` into RUN/exports/quarantine, and says so.

    Process 0 moves them. Raises StorageError if it cannot.
    """
    exports = reporter.directory / EXPORTS
    if jax.process_index() or not exports.is_dir():
        return
    abandoned = sorted(
        int(folder.name)
        for folder in exports.iterdir()
        if folder.name.isdecimal() and int(folder.name) > after
    )
    if not abandoned:
        return
    try:
        for step in abandoned:
            set_aside(exports / str(step))
    except OSError as error:
        raise StorageError(f"cannot move {exports}: {error.strerror}") from None
    listed = ", ".join(map(str, abandoned))
    reporter.say(f"exports of the abandoned steps {listed} are now in {EXPORTS}/{QUARANTINE}")
