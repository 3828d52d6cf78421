"""Opens the run directory: creates it, checks that it is writable, and locks it."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from spmdtrain.checkpoints.files.hostile import ODD, strange_in
from spmdtrain.config.errors import CheckpointError, ConfigError, StorageError
from spmdtrain.config.run_files import CONFIG, newest_step

MOST_ASIDE = 1000  # runs that --fresh has set aside


@contextlib.contextmanager
def open_directory(directory: Path, fresh: bool) -> Iterator[None]:
    """Holds the directory for this run. With `fresh`, an older run is renamed, never deleted.

    Process 0 creates and locks it while the others wait. Raises StorageError if it cannot, or if
    the directory is that of a published model.
    """
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            try:
                refuse_links(directory)
                refuse_published(directory, "another --run")
                if fresh and directory.exists():
                    _set_aside(directory)
                directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_run(directory))
            except OSError as error:
                what = f"cannot write the run directory {directory}: {error.strerror}"
                raise StorageError(what, fix="another --run, where you may write") from None
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("run directory")
        yield


def refuse_published(directory: Path, fix: str) -> None:
    """Raises StorageError for the folder of a published model, whose config.json a run would
    replace by its own.
    """
    if not (directory / CONFIG).is_file():  # a new directory, or a pipe in it
        return
    from spmdtrain.config.published.read_config import is_published

    if is_published(directory):
        raise StorageError(f"{directory} is a published model, which a run would damage", fix=fix)


def refuse_links(directory: Path) -> None:
    """Raises CheckpointError if a file to be written would land elsewhere, or block.

    Raises StorageError if a folder is in the place of a file, or a file in that of a folder.
    """
    for path, kind in strange_in(directory).items():
        fix = f"removing it, or another --run than {directory}"
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link: a run writes into its own directory only",
                found=f"it leads to {path.readlink()}",
                fix=fix,
            )
        wrong = CheckpointError if kind == ODD else StorageError
        raise wrong(f"{path} is {kind}", fix=fix)


def _set_aside(directory: Path) -> None:
    with only_run(directory):
        names = (Path(f"{directory}.{number}") for number in range(1, MOST_ASIDE))
        directory.rename(next(path for path in names if not path.exists()))


@contextlib.contextmanager
def only_run(directory: Path) -> Iterator[None]:
    """Holds RUN/lock, which names its holder. Raises StorageError if another process holds it.

    The lock ends with its process, however that ends. On a file system without locks, the holder
    that the file names counts, unless it is known to be gone.
    """
    with (directory / "lock").open("a+", encoding="utf-8") as file:
        file.seek(0)
        holder = _holder(file.read())
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except BlockingIOError:
            taken = True
        except OSError:  # no locks here
            taken = holder is not None and not _is_gone(holder)
        if taken:
            raise StorageError(
                f"another run is writing {directory}",
                found=_describe_holder(holder),
                fix="waiting until it ends, or another --run",
            )
        file.truncate(0)
        file.write(json.dumps(_this_process()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _this_process() -> dict[str, str | int]:
    """Identifies the holder of a lock; `start` tells it from a later process with the same pid."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "start": _start_of(pid)}


def _start_of(pid: int) -> int:
    """Returns when a process of this host began, in clock ticks since boot; 0 without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name may hold spaces


def _holder(text: str) -> dict[str, str | int] | None:
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match holder:
        case {"host": str(), "pid": int(), "start": int()}:
            return holder
        case _:
            return None


def _is_gone(holder: dict[str, str | int]) -> bool:
    """Returns True if the holder has ended; for a holder on another host, always False."""
    this_host = holder["host"] == socket.gethostname()
    return this_host and _start_of(int(holder["pid"])) != holder["start"]


def _describe_holder(holder: dict[str, str | int] | None) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else ""


def check_given(directory: Path, init_from: str | None, fresh: bool) -> None:
    """Raises ConfigError if a run that is given a state would start from something else."""
    newest = newest_step(directory)
    if newest is not None and not fresh:
        raise ConfigError(
            f"state= starts a new run, but {directory} holds step {newest}",
            fix="another directory, or fresh=True",
        )
    if init_from:
        what = f"state= and train.init_from={init_from!r} both give weights"
        raise ConfigError(what, fix="one of them")
