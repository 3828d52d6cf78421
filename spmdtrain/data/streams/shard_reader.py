"""Tokenises shards, one epoch after another, from any token on."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.prepare.encode import Recipe, encode_all
from spmdtrain.data.shuffle import permute, random_bits
from spmdtrain.data.streams.ledger import Ledger
from spmdtrain.data.streams.local_copies import LocalCopies
from spmdtrain.data.streams.shards import Shard
from spmdtrain.data.texts.documents import Chunk, read_chunks

SHARDS = 5  # stream of random bits; corpus.py, batches.py and source.py use 0 to 4


class DocumentTokens(NamedTuple):
    """The tokens of some whole documents of an epoch."""

    epoch: int
    at: int  # offset of the first token in the epoch
    ids: np.ndarray  # uint16 or uint32 [tokens]
    starts: np.ndarray  # int64, where documents start within `ids`
    is_end: bool = False  # no token of the epoch follows


class _Event(NamedTuple):
    """A chunk that is being encoded, or (None) the end of a shard."""

    chunk: Chunk | None
    epoch: int
    shard: int
    is_last: bool = False  # no other shard of the epoch follows


@dataclass(frozen=True)
class ShardReader:
    """A reader of shards in an order that depends only on `seed`; None: the order of the config."""

    shards: tuple[Shard, ...]
    recipe: Recipe
    copies: LocalCopies
    ledger: Ledger
    workers: int
    seed: int | None

    def order(self, epoch: int) -> list[int]:
        """Returns the numbers of the shards as an epoch reads them."""
        numbers = np.arange(len(self.shards))
        if self.seed is not None:
            key = random_bits(self.seed, SHARDS, epoch)
            numbers = np.argsort(permute(numbers, len(numbers), key))
        return numbers.tolist()

    def pieces(self, epoch: int, offset: int) -> Iterator[DocumentTokens]:
        """Yields the tokens from the token `offset` of an epoch on, endlessly.

        The first piece may begin before `offset`: at the last place that the ledger knows. Raises
        DataError if a shard cannot be read, or if none of them holds a document.
        """
        turn, before = self._shard_of(epoch, offset)
        tokens, row = self.ledger.place_before(self.order(epoch)[turn], offset - before)
        at = before + tokens
        events: deque[_Event] = deque()
        chunks = self._chunks(epoch, turn, row, events)
        encoded: Any = encode_all(self.recipe, chunks, self.workers)
        with closing(encoded):
            for chunk, documents in encoded:
                while (event := events.popleft()).chunk is None:
                    self.ledger.finish(event.shard, tokens)
                    tokens = 0
                    if event.is_last:
                        yield DocumentTokens(
                            event.epoch, at, documents.ids[:0], documents.lengths[:0], is_end=True
                        )
                        at = 0
                assert event.chunk is chunk, "chunks come out in the order in which they went in"
                self.ledger.pass_by(event.shard, tokens, chunk.first)
                starts = np.cumsum(documents.lengths) - documents.lengths
                yield DocumentTokens(event.epoch, at, documents.ids, starts[documents.lengths > 0])
                tokens += len(documents.ids)
                at += len(documents.ids)

    def _shard_of(self, epoch: int, offset: int) -> tuple[int, int]:
        """Returns the place in the order of the shard to read from for a token, and the tokens
        before it.

        It is the token's own shard, or the first one whose tokens have not been counted.
        """
        before = 0
        order = self.order(epoch)
        for turn, shard in enumerate(order):
            total = self.ledger.total_of(shard)
            if total is None or before + total > offset:
                return turn, before
            before += total
        raise AssertionError(f"token {offset} is beyond the {before} of an epoch")

    def _chunks(self, epoch: int, turn: int, row: int, events: deque[_Event]) -> Iterator[Chunk]:
        """Yields chunks endlessly, and notes each, and the end of each shard, in `events`."""
        while True:
            order = self.order(epoch)
            is_whole = turn == 0 and row == 0
            has_rows = False
            for place in range(turn, len(order)):
                for chunk in self._chunks_of(order, place, row):
                    has_rows = True
                    events.append(_Event(chunk, epoch, order[place]))
                    yield chunk
                events.append(_Event(None, epoch, order[place], is_last=place + 1 == len(order)))
                row = 0
            if is_whole and not has_rows:
                raise DataError("the files hold no text", found=self.shards[0].address)
            turn = 0
            epoch += 1

    def _chunks_of(self, order: list[int], place: int, row: int) -> Iterator[Chunk]:
        """Yields the chunks of a shard, named by its address; the next shard is copied
        meanwhile.
        """
        shard = self.shards[order[place]]
        with self.copies.held(shard) as path:
            if place + 1 < len(order):
                self.copies.fetch_ahead(self.shards[order[place + 1]])
            try:
                for chunk in read_chunks(path, self.recipe.field, skip=row):
                    yield replace(chunk, path=shard.address)
            except DataError as error:
                if not shard.is_remote:
                    raise
                raise DataError(error.what.replace(path, shard.address)) from None
