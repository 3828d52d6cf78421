"""Keeps measurements for later runs: one JSON file for each driver, jax and version of ours.

    {"machine": {"driver", "jax", "kernels"},
     "gpus": {KIND: {CLASS OF A CALL: {"implementation", "milliseconds", "faults", ...}}},
     "programs": {DIGEST: {"gpu": KIND, "calls": [CLASS, ...]}}}

`programs` says which classes a program has, so that a known one need not be traced. Files in
shipped/, in the same form, hold what we know about a GPU with any software: they apply if the
user's own file has no entry.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOM = Path(__file__).parents[1]
SHIPPED = Path(__file__).parent / "shipped"
FOLDER = "PALLAS_KERNELS_CACHE"  # variable: the folder of the tables
DRIVER = Path("/proc/driver/nvidia")


def machine() -> dict[str, str]:
    """Returns what a time depends on in addition to the GPU: its driver, jax, and our sources."""
    return {
        "driver": _driver(),
        "jax": importlib.metadata.version("jax"),
        "kernels": sources(),
    }


@cache
def sources() -> str:
    """Returns a hash of our sources: a checkout can change while its version does not."""
    digest = hashlib.sha256()
    for path in sorted(ROOM.rglob("*.py")):
        digest.update(path.relative_to(ROOM).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpu_models() -> list[str]:
    """Returns the names of this machine's GPUs. The driver gives them without opening a GPU."""
    models = []
    for path in sorted(DRIVER.glob("gpus/*/information")):
        with contextlib.suppress(OSError):
            model = re.search(r"Model:\s*(.*\S)", path.read_text(encoding="utf-8"))
            models += [model[1]] if model else []
    return models


def _driver() -> str:
    try:
        text = (DRIVER / "version").read_text(encoding="utf-8")
    except OSError:
        return "none"
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else "unknown"


def folder() -> Path | None:
    """Returns the folder of the tables; None for a user without a home."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if cache_home.startswith("~") else Path(cache_home) / "pallas_kernels"


class Table:
    """The table of this machine. `remarks` says what was wrong with its file."""

    def __init__(self, where: Path | None = None):
        place = where or folder()
        self.machine = machine()
        name = "_".join(f"{key}-{value}" for key, value in self.machine.items())
        file = re.sub(r"[^\w.-]", "-", name) + ".json"
        self.path = None if place is None else place / file
        self.remarks: list[str] = []
        self._contents = self._read(self.path)

    def entry(self, gpu: str, call: str) -> dict[str, Any] | None:
        """Returns what is known of a class of calls on this GPU."""
        for known in (self._contents, *_shipped()):
            entry = known["gpus"].get(gpu, {}).get(call)
            if entry is not None:
                return entry
        return None

    def chosen(self, gpu: str) -> dict[str, str]:
        """Returns class of a call -> the implementation that was measured as best on this GPU."""
        names = {}
        for known in reversed((self._contents, *_shipped())):
            for call, entry in known["gpus"].get(gpu, {}).items():
                names[call] = entry["implementation"]
        return names

    def program(self, digest: str) -> dict[str, Any] | None:
        """Returns the GPU and the calls of a program if all of the calls are known."""
        program = self._contents["programs"].get(digest)
        if program is None:
            return None
        known = (self.entry(program["gpu"], call) for call in program["calls"])
        return None if None in known else program

    def add(
        self,
        gpu: str,
        entries: Mapping[str, Mapping[str, Any]],
        programs: Mapping[str, Iterable[str]] = {},
    ) -> None:
        """Adds entries to the file, and keeps those that another process has added meanwhile.

        `programs`: digest -> the classes of its calls. Raises OSError if the file cannot be
        written.
        """
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.locked("table"):
            self._contents = self._read(self.path)
            self._contents["gpus"].setdefault(gpu, {}).update(entries)
            for digest, calls in programs.items():
                self._contents["programs"][digest] = {"gpu": gpu, "calls": sorted(calls)}
            _write(self.path, {"machine": self.machine} | self._contents)

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Holds a lock of this user, once no other process does; without a folder there is none."""
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (self.path.parent / f"{what}.lock").open("a", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read_again(self) -> None:
        """Rereads the file, which another process may have written."""
        self._contents = self._read(self.path)

    def document(self) -> dict[str, Any]:
        """Returns all that is known here, in the form of the file."""
        return {"machine": self.machine} | self._contents

    def _read(self, path: Path | None) -> dict[str, Any]:
        empty = {"gpus": {}, "programs": {}}
        if path is None:
            return empty
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return empty
        except (OSError, UnicodeDecodeError) as error:
            self.remarks.append(f"kernels: {path} cannot be read and is ignored: {error}")
            return empty
        try:
            return _checked(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            self.remarks.append(f"kernels: {path} is damaged and ignored")
            return empty


def _checked(document: Any) -> dict[str, Any]:
    """Returns the parts of a file. Raises an error if it has another form."""
    for entries in document["gpus"].values():
        for entry in entries.values():
            if not isinstance(entry["implementation"], str):
                raise TypeError(entry)
    for program in document["programs"].values():
        if not isinstance(program["gpu"], str) or not isinstance(program["calls"], list):
            raise TypeError(program)
    return {"gpus": document["gpus"], "programs": document["programs"]}


def _shipped() -> list[dict[str, Any]]:
    return [
        _checked(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(SHIPPED.glob("*.json"))
    ]


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the file completely or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
