"""Fixed blocks of a file, by which it is known again: these files may hold terabytes."""

import hashlib
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.token_files.rows import reading

BLOCKS = 64
BLOCK_BYTES = 2**16
File = str | tuple[int, int]  # as identity_of names it
TO_COMPARE = 3  # of the blocks of a file, by which a copy is known
COVERED = BLOCKS * BLOCK_BYTES  # a file up to this size is covered whole


def read_blocks(
    path: str, size: int, skip: int = 0, count: int = BLOCKS
) -> Iterator[tuple[int, bytes]]:
    """Yield (where it begins, content) of `count` blocks, spread over the bytes from `skip` on.

    The first block is at their start, the last at their end; `size` bytes follow `skip`. Blocks
    overlap in a small file.
    """
    last = max(size - BLOCK_BYTES, 0)
    with reading(path), open(path, "rb") as file:
        for at in np.linspace(0, last, count, dtype=np.int64).tolist():
            file.seek(skip + at)
            content = file.read(min(BLOCK_BYTES, size - at))
            if len(content) < min(BLOCK_BYTES, size - at):
                raise DataError(f"{path} was cut short while it was read", asked=f"{size} bytes")
            yield at, content


def hash_of_blocks(path: str, size: int) -> str:
    """Return a hex hash of as many blocks as it takes to cover a file, BLOCKS at most."""
    digest = hashlib.sha256(str(size).encode())
    count = min(BLOCKS, -(-size // BLOCK_BYTES))
    for _, content in read_blocks(path, size, count=count):
        digest.update(content)
    return digest.hexdigest()


def contents(path_of: Mapping[File, str]) -> dict[File, Hashable]:
    """Returns for each file what it shares with its copies, and with no other file.

    Blocks are read only of files that have the size of another.
    """
    sizes = {file: os.path.getsize(path) for file, path in path_of.items()}
    frequent = Counter(sizes.values())
    return {
        file: tuple(read_blocks(path_of[file], size, count=TO_COMPARE))
        if frequent[size] > 1
        else file
        for file, size in sizes.items()
    }
