"""Provides documents that a run tokenises while it reads them: `data.corpus = "jsonl"` or
`"parquet"`.

The order is a pure function of seed, shards and index. Without shuffling it is that of the token
files that `data prepare` makes from the same documents. With shuffling, each epoch reads the shards
in its own order, and shuffles the windows of each block of `data.shuffle_buffer`.

Every process makes all tokens and keeps its own rows: no sample depends on their number.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.config.schema import DataConfig, RunConfig
from spmdtrain.data.batches import EvalSet, EvalWindows, Range, make_batch
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.epochs import Endless
from spmdtrain.data.indices import sample_indices
from spmdtrain.data.prepare.encode import Recipe, encode_all
from spmdtrain.data.shuffle import permute, random_bits
from spmdtrain.data.streams.ledger import Ledger
from spmdtrain.data.streams.local_copies import LocalCopies, default_folder
from spmdtrain.data.streams.shard_reader import ShardReader
from spmdtrain.data.streams.shards import Shard, find_shards
from spmdtrain.data.streams.shuffle_blocks import WindowBlocks
from spmdtrain.data.texts.documents import Chunk, read_chunks
from spmdtrain.data.tokenizers.text_ends import begin_of_text, end_of_text
from spmdtrain.data.tokenizers.tokenizer import (
    Tokenizer,
    open_tokenizer,
    tokenizer_fingerprint,
)

WITHIN_BLOCK = 6  # stream of random bits; shard_reader.py uses 5
MOST_BLOCKS = 2**32  # of an epoch


@dataclass(frozen=True)
class StreamData:
    """The shards of documents to train on, and the validation tokens, which are held in memory."""

    shards: tuple[Shard, ...]
    recipe: Recipe
    ledger: Ledger
    copies: LocalCopies
    empty: Corpus  # describes the tokens
    validation: Corpus | None
    fingerprint: str

    @property
    def vocab(self) -> int:
        """The number of ids: all are below it."""
        return self.empty.vocab

    @property
    def tokenizer(self) -> dict:
        return self.recipe.tokenizer

    @property
    def begin_of_text(self) -> int | None:
        return self.recipe.begin_of_text

    @property
    def end_of_text(self) -> int | None:
        return self.recipe.end_of_text

    @property
    def template(self) -> None:
        return None

    def samples_per_epoch(self, config: RunConfig) -> Endless:
        return Endless(f"data.corpus={config.data.corpus!r}, whose end is not known")

    def train_samples(self, config: RunConfig) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
        """Returns `samples(indices)`, the batch of these global sample indices.

        Any index is allowed; consecutive ones are made only once.
        """
        settings = config.data
        seed = config.train.seed if settings.shuffle else None
        length = config.train.sequence_length
        reader = ShardReader(
            self.shards, self.recipe, self.copies, self.ledger, settings.workers, seed
        )
        blocks = WindowBlocks(reader, self.empty, length, settings.shuffle_buffer)

        def rows_of(indices: np.ndarray) -> dict[str, np.ndarray]:
            """Returns the samples of increasing `indices` that share the block of the first."""
            block, (epoch, number), first = blocks.find(int(indices[0]))
            windows = first + indices - indices[0]
            windows = windows[windows < block.windows]
            indices = indices[: len(windows)]
            if seed is not None:
                key = random_bits(seed, WITHIN_BLOCK, epoch * MOST_BLOCKS + number)
                windows = permute(windows, block.windows, key)
            starts = windows * length
            rows = np.stack([block.corpus.read(at, at + length + 1) for at in starts.tolist()])
            mask = np.ones((len(rows), length), np.float32)
            return make_batch(block.corpus, rows, starts, mask, indices, settings.packing)

        def samples(indices: np.ndarray) -> dict[str, np.ndarray]:
            indices = sample_indices(indices)
            if not len(indices):
                raise DataError("a batch has at least one sample", found="no sample index")
            order = np.argsort(indices, kind="stable")
            remaining = indices[order]
            batches = []
            while len(remaining):
                batches.append(rows_of(remaining))
                remaining = remaining[len(batches[-1]["sample"]) :]
            back = np.argsort(order)
            return {
                name: np.concatenate([batch[name] for batch in batches])[back]
                for name in batches[0]
            }

        return samples

    def eval_sets(self, config: RunConfig) -> list[EvalSet]:
        if self.validation is None:
            raise ConfigError("a stream has no validation data", fix="--set data.validation_path=F")
        every = Range(0, len(self.validation.tokens))
        length = config.train.sequence_length
        windows = EvalWindows(self.validation, every, length, packing=config.data.packing)
        return [EvalSet("", 1.0, windows, every.size - 1)]

    def describe(self, config: RunConfig) -> str:
        """Returns the line in which a run describes its data."""
        size = sum(shard.size for shard in self.shards) / 1e9
        files = "1 file" if len(self.shards) == 1 else f"{len(self.shards):,} files"
        return f"{config.data.corpus}, {files} of {size:.3g} GB, tokenized as they are read"


def open_stream(settings: DataConfig, *, validates: bool) -> StreamData:
    """Opens the shards that `settings` names; with `validates`, those to validate on too.

    Raises DataError if a file is missing, of another kind, or cannot be read.
    """
    recipe, tokenizer = recipe_of(settings)
    shards = find_shards(_patterns(settings.path), settings.corpus)
    folder = Path(os.path.expanduser(settings.cache)) if settings.cache else default_folder()
    copies = LocalCopies(folder, int(settings.cache_gb * 1e9))
    empty = Corpus(
        tokens=np.zeros(0, np.uint16),
        document_starts=np.zeros(1, np.int64),
        vocab=tokenizer.size,
        tokenizer=tokenizer,
        fingerprint="",
        begin_of_text=recipe.begin_of_text,
        end_of_text=recipe.end_of_text,
    )
    validation = None
    if settings.validation_path and validates:
        others = find_shards(_patterns(settings.validation_path), settings.corpus)
        _refuse_copies(shards, others)
        validation = _read_whole(others, recipe, copies, empty, settings.workers)
    fingerprint = _fingerprint(shards, recipe)
    ledger = Ledger(len(shards))
    return StreamData(shards, recipe, ledger, copies, empty, validation, fingerprint)


def recipe_of(settings: DataConfig) -> tuple[Recipe, Tokenizer]:
    """Returns the recipe that tokenises documents as `data prepare` would, and its tokenizer."""
    name = settings.tokenizer
    tokenizer, end = end_of_text(open_tokenizer(name), "auto", name)
    tokenizer, begin = begin_of_text(tokenizer, settings.begin_of_text, name)
    return Recipe(tokenizer.spec(), end, settings.field, begin_of_text=begin), tokenizer


def _patterns(path: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path or ()


def _refuse_copies(training: tuple[Shard, ...], validating: tuple[Shard, ...]) -> None:
    """Raises DataError if a validation file is also a training file."""
    known = {(shard.size, shard.stamp): shard.address for shard in training if shard.stamp}
    known |= {(shard.address, ""): shard.address for shard in training}
    for shard in validating:
        same = known.get((shard.size, shard.stamp)) or known.get((shard.address, ""))
        if same:
            raise DataError(
                f"data.validation_path: {shard.address} is {same}, which trains", fix="other files"
            )


def _read_whole(
    shards: tuple[Shard, ...], recipe: Recipe, copies: LocalCopies, empty: Corpus, workers: int
) -> Corpus:
    """Returns all documents of some shards as one corpus in memory."""

    def chunks() -> Iterator[Chunk]:
        for shard in shards:
            with copies.held(shard) as path:
                yield from read_chunks(path, recipe.field)

    encoded_chunks = [encoded for _, encoded in encode_all(recipe, chunks(), workers)]
    lengths = np.concatenate([np.zeros(0, np.int64), *(chunk.lengths for chunk in encoded_chunks)])
    if lengths.sum() < 2:
        raise DataError("the files to validate on hold no text", found=shards[0].address)
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    tokens = np.concatenate([chunk.ids for chunk in encoded_chunks])
    return replace(empty, tokens=tokens, document_starts=starts)


def _fingerprint(shards: tuple[Shard, ...], recipe: Recipe) -> str:
    """Returns a hash of everything that determines the tokens; local paths do not count."""
    digest = hashlib.sha256(tokenizer_fingerprint(recipe.tokenizer).encode())
    digest.update(f"{recipe.end_of_text} {recipe.field!r}".encode())
    if recipe.begin_of_text is not None:
        digest.update(f" {recipe.begin_of_text}".encode())
    for shard in shards:
        name = shard.address if shard.is_remote else ""
        digest.update(f"\n{name} {shard.size} {shard.stamp}".encode())
    return digest.hexdigest()
