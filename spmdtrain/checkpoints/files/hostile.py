"""Guards against a hostile run directory, which may point outside itself or exhaust memory.

Nothing in a checkpoint is code: TensorStore reads the arrays, the rest is JSON, and the handlers
that Orbax names in it are never looked up. The remaining dangers are links, leaf names that are
paths, and sizes larger than the files. Each is refused before anything is read.
"""

import json
import math
import operator
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.run_files import (
    BUNDLES,
    CHECKPOINTS,
    COMPILED,
    CONFIG,
    EVENTS,
    METRICS,
    PREDICTED,
    REPORT,
    STARTS,
    STEPS,
    SUMMARY,
)

# Bytes of arrays per byte of files: zstd compresses weights no further unless they are all equal.
MOST_EXPANSION = 4096
SMALL = 1 << 26  # bytes; any machine has this many


def check_files(folder: Path) -> None:
    """Raises ValueError if the folder, or anything below it, is not a plain file or a folder."""
    for path in (folder, *_below(folder)):
        if not _is_plain(path):
            kind = "a link" if path.is_symlink() else "no plain file"
            raise ValueError(f"{path.name} in it is {kind}")


# The folders of a run directory that a run or a sink writes into. W&B's contains its own links.
WRITTEN = ("", CHECKPOINTS, f"{CHECKPOINTS}/quarantine", "tensorboard", "profile", STARTS, BUNDLES)
# The files that it writes.
DOCUMENTS = (CONFIG, COMPILED, PREDICTED, SUMMARY, REPORT)
FILES = (
    "lock",
    METRICS,
    "metrics.tmp",
    STEPS,
    "steps.tmp",
    EVENTS,
    "wandb/id",
    "wandb/last_step",
    *DOCUMENTS,
    *(f"{name}.tmp" for name in DOCUMENTS),
)
ODD = "neither a plain file nor a folder"


def strange_in(directory: Path) -> dict[Path, str]:
    """Returns the entries of a run directory that a run must not write to, with their kind.

    Writing through a link would write outside the directory, and a pipe blocks its writer.
    """
    folders = [directory / name for name in WRITTEN]
    files = [directory / name for name in FILES]
    entries = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    entries += [path for path in files if os.path.lexists(path)]
    strange = {
        path: "a link" if path.is_symlink() else ODD for path in entries if not _is_plain(path)
    }
    strange |= {path: "no folder" for path in folders[1:] if path.is_file()}
    strange |= {path: "a folder" for path in files if path.is_dir()}
    return dict(sorted(strange.items()))


def _is_plain(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def check_description(step: Path) -> None:
    """Raises ValueError if the file in which Orbax describes a step would crash its start.

    Orbax reads this file for every step. It tolerates invalid JSON, but crashes on a JSON value
    that is not an object or that Python cannot parse.
    """
    path = step / "_CHECKPOINT_METADATA"
    if not path.exists():
        return
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path.name} in it is not a plain file")
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
    """Raises ValueError if the name of a leaf could be taken for a path."""
    for name in names:
        strange = not name.isprintable() or "/" in name or "\\" in name or ".." in name
        if strange or name.startswith("."):
            raise ValueError(f"it names a leaf {name[:80]!r}, which could be a path")


def check_chunks(arrays: Mapping[str, Any]) -> None:
    """Raises ValueError if a chunk claims to be larger than its array: chunks are always read
    whole.

    `arrays`: Orbax's descriptions by name.
    """
    for name, array in arrays.items():
        chunk = array.storage.chunk_shape if array.storage else None
        if chunk is None:
            continue
        largest = [max(size, 1) for size in array.shape]
        if len(chunk) != len(largest) or any(map(operator.gt, chunk, largest)):
            raise ValueError(f"{name} of shape {list(array.shape)} claims chunks of {list(chunk)}")


def check_sizes(arrays: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError if weights claim to be larger than their files in `folder` can be."""
    limit = max(SMALL, MOST_EXPANSION * sum(path.stat().st_size for path in _below(folder)))
    claimed = 0
    for name, array in arrays.items():
        elements = math.prod(array.shape)
        claimed += elements * array.dtype.itemsize
        if claimed > limit:
            raise ValueError(f"{name} claims {elements:.3g} elements, which its files cannot hold")


def _below(folder: Path) -> Iterable[Path]:
    """Yields everything below a folder; does not follow links."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(where, name)
