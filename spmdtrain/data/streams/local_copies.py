"""Keeps copies of remote files in a folder of this machine, and removes the least recently used
first.

Several processes share the folder. One of them copies at a time; a file in use is locked, so that
no process removes a file that another one reads.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from spmdtrain.config.errors import DataError, StorageError
from spmdtrain.data.streams.remote import describe, parts_of
from spmdtrain.data.streams.shards import Shard

PART = ".part"  # ends the name of a file that is being copied


def default_folder() -> Path:
    """Returns the folder of copies if `data.cache` names none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "spmdtrain" / "copies"


class LocalCopies:
    """A folder that holds at most `most_bytes` of copies. Local files need none."""

    def __init__(self, folder: Path, most_bytes: int):
        self._folder = folder
        self._most = most_bytes
        self._ahead: dict[str, Future] = {}
        self._thread: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def held(self, shard: Shard) -> Iterator[str]:
        """Yields the path of a shard on this machine, which stays while the context is open.

        Raises DataError if it cannot be copied, or has changed since it was listed. Raises
        StorageError if there is no room for it.
        """
        if not shard.is_remote:
            yield shard.address
            return
        waited = self._ahead.pop(shard.address, None)
        if waited is not None:
            waited.exception()  # whoever needs the file meets the failure again below
        while True:
            path = self._copied(shard)
            with contextlib.ExitStack() as open_files:
                try:
                    file = open_files.enter_context(path.open("rb"))
                except FileNotFoundError:
                    continue  # another process has made room in between
                fcntl.flock(file, fcntl.LOCK_SH)
                if not path.exists():
                    continue
                os.utime(path)
                yield str(path)
                return

    def fetch_ahead(self, shard: Shard) -> None:
        """Begins to copy a shard that will be read next."""
        if not shard.is_remote or shard.address in self._ahead:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "copies")
        self._ahead[shard.address] = self._thread.submit(self._copied, shard)

    def close(self) -> None:
        """Stops copying ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def path_of(self, shard: Shard) -> Path:
        """Returns the path of a shard's copy, whether or not it exists; it has the shard's
        ending.
        """
        known = hashlib.sha256(f"{shard.address} {shard.size} {shard.stamp}".encode())
        name = shard.address.partition("?")[0].rpartition("/")[2]
        return self._folder / f"{known.hexdigest()[:32]}-{name[-100:]}"

    def _copied(self, shard: Shard) -> Path:
        path = self.path_of(shard)
        if shard.size > self._most:
            raise DataError(
                f"{shard.address} is larger than the folder of copies may grow",
                asked=f"data.cache_gb={self._most / 1e9:g}",
                found=f"{shard.size / 1e9:.3g} GB",
                fix=f"--set data.cache_gb={2 * shard.size / 1e9:.2g}",
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    self._make_room(shard.size)
                    self._copy(shard, path)
        except OSError as error:
            raise StorageError(
                f"cannot copy {shard.address} to {self._folder}: {error.strerror or error}",
                fix="--set data.cache=FOLDER",
            ) from None
        return path

    def _copy(self, shard: Shard, path: Path) -> None:
        spare = path.with_name(path.name + PART)
        try:
            with spare.open("wb") as file:
                for part in parts_of(shard.address, shard.size):
                    file.write(part)
            now = describe(shard.address)
            if (now.size, now.stamp) != (shard.size, shard.stamp):
                raise DataError(
                    f"{shard.address} has changed since it was listed",
                    asked=f"{shard.size} bytes, {shard.stamp or 'no stamp'}",
                    found=f"{now.size} bytes, {now.stamp or 'no stamp'}",
                    fix="files that nothing writes to while a run reads them",
                )
            spare.replace(path)
        finally:
            spare.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Removes the least recently used copies, but none in use."""
        files = [path for path in self._folder.iterdir() if path.name != "lock"]
        for path in files:
            if path.name.endswith(PART):  # of a process that was killed: we hold the lock
                path.unlink(missing_ok=True)
        used = {path: path.stat() for path in files if not path.name.endswith(PART)}
        total = sum(status.st_size for status in used.values())
        for path in sorted(used, key=lambda path: used[path].st_mtime):
            if total + size <= self._most:
                return
            if _removed(path):
                total -= used[path].st_size
        if total + size > self._most:
            raise OSError(errno.ENOSPC, f"{total / 1e9:.3g} GB of copies are in use")


def _removed(path: Path) -> bool:
    """Removes a file unless it is in use. Returns whether it is gone."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        path.unlink(missing_ok=True)
    return True
