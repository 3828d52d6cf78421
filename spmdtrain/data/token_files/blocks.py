"""Reads fixed blocks by which a file is recognised, since token files may hold terabytes."""

import hashlib
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.token_files.rows import reading

BLOCKS = 64
BLOCK_BYTES = 2**16
File = str | tuple[int, int]  # as returned by identity_of
TO_COMPARE = 3  # blocks of a file that identify a copy
COVERED = BLOCKS * BLOCK_BYTES  # a file up to this size is covered whole


def read_blocks(
    path: str, size: int, skip: int = 0, count: int = BLOCKS
) -> Iterator[tuple[int, bytes]]:
    """Yields (start, content) of `count` blocks, spread over the bytes from `skip` on.

    `size` bytes follow `skip`: the first block is at their start, the last at their end. Blocks
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
    """Returns a hex hash of enough blocks to cover a file, but at most BLOCKS."""
    digest = hashlib.sha256(str(size).encode())
    count = min(BLOCKS, -(-size // BLOCK_BYTES))
    for _, content in read_blocks(path, size, count=count):
        digest.update(content)
    return digest.hexdigest()


def contents(path_of: Mapping[File, str]) -> dict[File, Hashable]:
    """Returns for each file a key that it shares with its copies only.

    Blocks are read only of files of equal size.
    """
    sizes = {file: os.path.getsize(path) for file, path in path_of.items()}
    frequent = Counter(sizes.values())
    return {
        file: tuple(read_blocks(path_of[file], size, count=TO_COMPARE))
        if frequent[size] > 1
        else file
        for file, size in sizes.items()
    }
