"""Reads the names of the tensors in a published directory, from its index or from headers."""

import json
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

INDEX = "model.safetensors.index.json"
LARGEST = 256 * 2**20  # bytes of an index or a header


def names_in(folder: Path, ignored: Collection[str] = ()) -> frozenset[str]:
    """Returns the names of all tensors but for those of the patterns `ignored`; none if there are
    no files, or one of them is damaged.

    Whoever reads the weights says what is wrong with the files.
    """
    try:
        names = frozenset(_names(folder))
        return frozenset(x for x in names if not any(fnmatchcase(x, one) for one in ignored))
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return frozenset()


def _names(folder: Path) -> Iterator[str]:
    index = folder / INDEX
    if index.is_file():
        if index.stat().st_size <= LARGEST:
            yield from json.loads(index.read_bytes())["weight_map"]
        return
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            yield from json.loads(file.read(size)) if size <= LARGEST else ()
