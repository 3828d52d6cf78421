"""The run directory: there, writable, and this run's alone."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from spmdtrain.config.errors import CheckpointError, ConfigError, StorageError
from spmdtrain.running.checkpoint import newest_step

MOST_ASIDE = 1000  # runs that --fresh has set aside


@contextlib.contextmanager
def open_directory(directory: Path, fresh: bool) -> Iterator[None]:
    """Holds the directory for this run. With `fresh` an older run is renamed, never deleted.

    Process 0 makes and locks it; the others wait until it has. StorageError where it cannot.
    """
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            try:
                if fresh and directory.exists():
                    _set_aside(directory)
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_run(directory))
            except OSError as error:
                what = f"cannot write the run directory {directory}: {error.strerror}"
                raise StorageError(what) from None
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("run directory")
        yield


def _set_aside(directory: Path) -> None:
    with only_run(directory):
        names = (Path(f"{directory}.{number}") for number in range(1, MOST_ASIDE))
        directory.rename(next(path for path in names if not path.exists()))


@contextlib.contextmanager
def only_run(directory: Path) -> Iterator[None]:
    """Holds RUN/lock; a StorageError where another process does.

    The lock goes with its process, however that ends. A file system without locks has none.
    """
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another run is writing {directory}"
            raise StorageError(what, fix="another --run, or wait for it") from None
        except OSError:
            pass
        yield


def check_source(source: str | None, directory: Path, fresh: bool) -> None:
    """`train.init_from` holds a checkpoint, and is not the run that is set aside."""
    if source is None:
        return
    asked = f"train.init_from='{source}'"
    if fresh and Path(source).resolve() == directory.resolve():
        raise ConfigError(f"{asked} is the run that --fresh sets aside", fix="another --run")
    if newest_step(Path(source)) is None:
        fix = "the directory of a trained run"
        raise CheckpointError(f"{asked} holds no checkpoint", fix=fix)
