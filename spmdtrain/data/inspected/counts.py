"""Counts a corpus: its documents, masked tokens, rare ids, and repetitions."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spmdtrain.data.corpus import Corpus
from spmdtrain.data.source import CorpusData, Data, MixtureData

MOST_TOKENS = 2**26  # that are counted of one corpus
AT_ONCE = 2**22  # tokens read at a time
RARE = 10  # an id that occurs less often has learned little
UNKNOWN = ("<unk>", "[UNK]", "<|unk|>", "<|unknown|>")


@dataclass(frozen=True)
class CorpusCounts:
    """The counts of a corpus; `name` is that of a source in a mixture, else empty.

    `tokens` are all of its tokens, of which the first `counted` were examined. Lengths are in
    tokens, and None if the file does not say where documents start. `repeated` documents are equal
    to an earlier one. Of the `vocab` ids, `unused` never occur and `rare` fewer than RARE times.
    `unknown` counts the tokenizer's token for unknown text; None if it has none.
    """

    name: str
    tokens: int
    counted: int
    masked: int
    documents: int | None
    longest: int | None
    median: int | None
    repeated: int | None
    repeated_tokens: int | None
    vocab: int
    unused: int
    rare: int
    unknown: int | None


def count_data(data: Data) -> list[CorpusCounts]:
    """Returns the counts of each corpus of a run; empty if its data is made while it is read."""
    if isinstance(data, CorpusData):
        return [count_corpus(data.corpus)]
    if isinstance(data, MixtureData):
        parts = zip(data.names, data.sources, strict=True)
        return [count_corpus(source.corpus, name) for name, source in parts]
    return []


def count_corpus(corpus: Corpus, name: str = "", limit: int = MOST_TOKENS) -> CorpusCounts:
    """Returns the counts of the first `limit` tokens of a corpus."""
    counted = min(len(corpus.tokens), limit)
    often = np.zeros(corpus.vocab, np.int64)
    masked = 0
    for start in range(0, counted, AT_ONCE):
        stop = min(start + AT_ONCE, counted)
        often += np.bincount(corpus.read(start, stop), minlength=corpus.vocab)
        masked += int(stop - start - corpus.counts(start, stop).sum(dtype=np.float64))
    unknown = _unknown_id(corpus)
    lengths, repeated, repeated_tokens = None, None, None
    if corpus.has_documents:
        lengths = np.diff(corpus.document_starts, append=len(corpus.tokens))
        repeated, repeated_tokens = _repeated(corpus, counted)
    return CorpusCounts(
        name=name,
        tokens=len(corpus.tokens),
        counted=counted,
        masked=masked,
        documents=None if lengths is None else len(lengths),
        longest=None if lengths is None else int(lengths.max()),
        median=None if lengths is None else int(np.median(lengths)),
        repeated=repeated,
        repeated_tokens=repeated_tokens,
        vocab=corpus.vocab,
        unused=int((often == 0).sum()),
        rare=int(((often > 0) & (often < RARE)).sum()),
        unknown=None if unknown is None else int(often[unknown]),
    )


def _unknown_id(corpus: Corpus) -> int | None:
    """Returns the id that stands for unknown text; None if the tokenizer has none."""
    if corpus.tokenizer is None:
        return None
    ids = [corpus.tokenizer.id_of(name) for name in UNKNOWN]
    return next((token for token in ids if token is not None), None)


def _repeated(corpus: Corpus, counted: int) -> tuple[int, int]:
    """Returns how many documents among the first tokens equal an earlier one, and their tokens."""
    earlier: set[bytes] = set()
    documents, tokens = 0, 0
    for ids in _documents(corpus, counted):
        digest = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        if digest in earlier:
            documents += 1
            tokens += len(ids)
        earlier.add(digest)
    return documents, tokens


def _documents(corpus: Corpus, counted: int) -> Iterator[np.ndarray]:
    """Yields the ids of each document that lies entirely within the first `counted` tokens."""
    bounds = np.append(corpus.document_starts, len(corpus.tokens))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if stop > counted:
            return
        yield corpus.read(start, stop)
