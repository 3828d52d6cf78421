"""Finds the files of a stream, with their names, sizes and identities."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from spmdtrain.config.errors import DataError
from spmdtrain.data.streams.remote import find_remote, is_remote
from spmdtrain.data.texts.documents import command_to_prepare, format_of
from spmdtrain.data.texts.files import find_files
from spmdtrain.data.token_files.blocks import hash_of_blocks


@dataclass(frozen=True)
class Shard:
    """A file of documents: a path on this machine, or an address of a store."""

    address: str
    size: int  # bytes
    stamp: str  # changes with its content

    @property
    def is_remote(self) -> bool:
        return is_remote(self.address)


def find_shards(patterns: Iterable[str], kind: str) -> tuple[Shard, ...]:
    """Returns the files that paths, globs and addresses name, in their order.

    `kind` is "jsonl" or "parquet". Raises DataError if a pattern matches nothing, if a file is
    named twice, or if one is of another kind.
    """
    by_address: dict[str, Shard] = {}
    for pattern in patterns:
        shards = _find_remote(pattern) if is_remote(pattern) else _find_local(pattern)
        for shard in shards:
            if shard.address in by_address:
                raise DataError(f"{shard.address} is named twice", fix="naming it once")
            by_address[shard.address] = shard
    for shard in by_address.values():
        if format_of(shard.address) != kind:
            fix = "other files"
            if format_of(shard.address) in ("jsonl", "parquet"):
                fix = f"--set data.corpus={format_of(shard.address)}"
            elif not shard.is_remote:
                fix = command_to_prepare(shard.address)
            raise DataError(
                f"{shard.address} is not a file of the kind that is streamed",
                asked=f"data.corpus={kind!r}",
                fix=fix,
            )
    return tuple(by_address.values())


def _find_remote(pattern: str) -> list[Shard]:
    return [Shard(*file) for file in find_remote(pattern)]


def _find_local(pattern: str) -> list[Shard]:
    shards = []
    for path in find_files([pattern]):
        size = os.path.getsize(path)
        shards.append(Shard(path, size, hash_of_blocks(path, size)))
    return shards
