"""Keeps a run directory from somebody else from leading out of itself or filling the memory.

Nothing in a checkpoint is code: arrays are read by TensorStore, the rest is JSON, and the handlers
that Orbax names in it are not looked up. What is left are links, names of leaves that are paths,
and sizes that are claimed and not there. Each is refused before anything is read.
"""

import json
import math
import operator
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Bytes of arrays for a byte of files: zstd makes no more of weights, if they are not all alike.
MOST_EXPANSION = 4096
SMALL = 1 << 26  # bytes that any machine has


def check_files(folder: Path) -> None:
    """ValueError where something below a folder, or the folder, is no plain file and no folder."""
    for path in (folder, *_below(folder)):
        if not _is_plain(path):
            kind = "a link" if path.is_symlink() else "no plain file"
            raise ValueError(f"{path.name} in it is {kind}")


# The folders of a run directory that a run, or a sink, writes into. W&B's has links of its own.
WRITTEN = ("", "checkpoints", "checkpoints/quarantine", "tensorboard", "profile")


def strange_in(directory: Path) -> list[Path]:
    """The entries of a run directory that are no plain files and no folders.

    What a run writes into a link would go where it leads, and a pipe keeps its writer waiting.
    """
    folders = [directory / name for name in WRITTEN]
    entries = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted(path for path in entries if not _is_plain(path))


def _is_plain(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def check_description(step: Path) -> None:
    """ValueError where the file in which Orbax describes a step would end its start.

    It reads those of all steps, and takes what is no JSON; a JSON value that is no object, or one
    that Python does not read, ends it.
    """
    path = step / "_CHECKPOINT_METADATA"
    if not path.exists():
        return
    if not _is_plain(path):
        raise ValueError(f"{path.name} in it is no plain file")
    wrong = None
    try:
        if not isinstance(json.loads(path.read_bytes()), dict):
            wrong = "no JSON object"
    except RecursionError:
        wrong = "nested too deeply"
    except (json.JSONDecodeError, UnicodeDecodeError):
        return
    except ValueError:
        wrong = "a number of thousands of digits"
    if wrong:
        raise ValueError(f"{path.name} in it is {wrong}")


def check_names(names: Iterable[str]) -> None:
    """ValueError where the name of a leaf could be taken for a path."""
    for name in names:
        strange = not name.isprintable() or "/" in name or "\\" in name or ".." in name
        if strange or name.startswith("."):
            raise ValueError(f"it names a leaf {name[:80]!r}, which could be a path")


def check_chunks(arrays: Mapping[str, Any]) -> None:
    """ValueError where a chunk, which is read whole, claims to be larger than its array.

    `arrays`: Orbax's descriptions by name.
    """
    for name, array in arrays.items():
        chunk = array.storage.chunk_shape if array.storage else None
        if chunk is None:
            continue
        most = [max(size, 1) for size in array.shape]
        if len(chunk) != len(most) or any(map(operator.gt, chunk, most)):
            raise ValueError(f"{name} of shape {list(array.shape)} claims chunks of {list(chunk)}")


def check_sizes(arrays: Mapping[str, Any], folder: Path) -> None:
    """ValueError where weights claim to be larger than their files in `folder` can be."""
    most = max(SMALL, MOST_EXPANSION * sum(path.stat().st_size for path in _below(folder)))
    claimed = 0
    for name, array in arrays.items():
        elements = math.prod(array.shape)
        claimed += elements * array.dtype.itemsize
        if claimed > most:
            raise ValueError(f"{name} claims {elements:.3g} elements, which its files cannot hold")


def _below(folder: Path) -> Iterable[Path]:
    """Everything below a folder; links are not followed."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(where, name)
