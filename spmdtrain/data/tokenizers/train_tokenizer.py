"""Trains a tokenizer on the user's documents: `spmdtrain tokenizer train`."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.writing import writing
from spmdtrain.data.prepare.file_progress import plain_lines
from spmdtrain.data.texts.documents import find_inputs, lines_of_separator, texts_to_learn
from spmdtrain.data.tokenizers.text_ends import END_NAMES

BYTES = 256  # every byte is a token, so every text has tokens
FEWEST = 2  # times a pair must occur to become a token


def train_tokenizer(
    paths: Iterable[str],
    out: str,
    vocab: int,
    *,
    field: str = "text",
    split_on: str | None = None,
    special: Iterable[str] = (),
) -> None:
    """Writes the `tokenizer.json` of a byte-level BPE trained on documents.

    It splits text into words as GPT-2 does, and merges bytes only within words (Sennrich, Haddow
    and Birch, 2016, arXiv:1508.07909). The end of text and the `special` tokens come first, then
    the bytes, then the merges, up to `vocab` tokens in all, or fewer if the documents have no more
    pairs that occur twice.

    Raises DataError if the documents cannot be read, `out` exists, or `vocab` is too small.
    """
    tokenizers = _import_tokenizers()
    named = list(dict.fromkeys([END_NAMES[0], *special]))
    if vocab < BYTES + len(named):
        raise DataError(
            f"a vocabulary of {vocab} has no room for {BYTES} bytes and {', '.join(named)}",
            fix=f"--vocab {BYTES + len(named)} or more",
        )
    path = Path(os.path.expanduser(out))
    if os.path.lexists(path):
        raise DataError(f"{out} exists already", fix="another --out, or remove it first")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=FEWEST,
        special_tokens=named,
        initial_alphabet=byte_level.alphabet(),
        show_progress=sys.stderr.isatty(),  # its own bars
    )
    files = find_inputs(paths)
    spare = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(out):  # fail before training if it cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        spare.touch()
    try:
        tokenizer.train_from_iterator(_read(files, field, split_on), trainer)
        with writing(out):
            spare.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            spare.replace(path)
    finally:
        spare.unlink(missing_ok=True)
    size = tokenizer.get_vocab_size()
    for line in lines_of_separator(files, split_on):
        print(line)
    print(f"{out}: {size:,} tokens, of which {len(named)} special: {', '.join(named)}")


def _read(files: list[str], field: str, split_on: str | None) -> Iterator[str]:
    """Yields the texts of files, and reports progress if there is no terminal."""
    if sys.stderr.isatty():
        yield from texts_to_learn(files, field, split_on)
        return
    sizes = [os.path.getsize(file) for file in files]
    before = dict(zip(files, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    say = plain_lines(sum(sizes))
    yield from texts_to_learn(
        files, field, split_on, lambda file, read: say(before[file] + read, "")
    )
    print("all is read; merging pairs", file=sys.stderr, flush=True)


def _import_tokenizers():
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DataError(
            "a tokenizer is made by the package `tokenizers`, which is not installed",
            fix="pip install 'spmdtrain[hf]'",
        ) from None
    return tokenizers
