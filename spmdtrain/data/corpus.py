"""Open the corpora that a run can name: Python's library, noise, text files, token files.

A *corpus* is one long row of token ids, document after document. *Offsets* count tokens from its
start.
"""

import hashlib
import math
import mmap
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.documents import COMPRESSIONS, format_of
from spmdtrain.data.files import find_files, read_text
from spmdtrain.data.foreign_tokens import ForeignTokens, is_foreign, open_foreign
from spmdtrain.data.shuffle import random_bits
from spmdtrain.data.tokenizer import Tokenizer, from_spec, open_tokenizer, tokenizer_fingerprint
from spmdtrain.data.tokens import (
    DTYPES,
    TokenSource,
    Unmapped,
    open_tokens,
    storage_dtype,
    token_paths,
)

STDLIB_BYTES = 4_000_000  # enough for a quick start to fall visibly, read in a fraction of a second
STDLIB_LEFT_OUT = {
    # Not the library's source.
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib-dynload",
    # Tests, some of which are not even valid text.
    "test",
    "tests",
    "idle_test",
    "turtledemo",
    # Generated tables, and relics.
    "encodings",
    "pydoc_data",
    "lib2to3",
    "idlelib",
    "ensurepip",
    "distutils",
}
# A mapping holds its file open, and a process may have 1024 open, on some systems 256. Where there
# are more files than this, each is opened whenever it is read.
MOST_MAPPED = 128
SYNTHETIC_VOCAB = 64
SYNTHETIC_DOCUMENTS = 2048
SYNTHETIC_LENGTH = 512  # of each document


@dataclass(frozen=True)
class Corpus:
    """Token ids, where documents start in them, and a fingerprint."""

    # [tokens] uint16 or uint32; supports len() and slices
    tokens: "np.ndarray | Unmapped | Concatenated"
    document_starts: np.ndarray  # int64 offsets, strictly increasing, the first is 0
    vocab: int  # ids are < vocab
    tokenizer: Tokenizer | None  # None: the ids mean no text
    fingerprint: str  # hex; changes with content and tokenizer
    entropy: float | None = None  # nats per token that no model can beat, where it is known
    files: tuple[tuple[int, str], ...] = ()  # (first offset, path) of the files, for messages
    mappings: tuple["Mapping", ...] = ()  # of the files, in their order, where they are mapped
    loss: "np.ndarray | Concatenated | None" = None  # [tokens] uint8, 1: counts; None: all count
    end_of_text: int | None = None  # the id that ends each document, where one does
    has_documents: bool = True  # whether `document_starts` are known
    validation_start: int | None = None  # where the tokens begin that validate, if files do

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids at the offsets start to stop - 1, int32.

        Raises DataError where one lies outside the vocabulary, which would be no row of a table.
        """
        ids = self.tokens[start:stop]
        outside = ids >= self.vocab
        if outside.any():
            first = int(outside.argmax())
            self._refuse(start + first, int(ids[first]))
        return ids.astype(np.int32)

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read the tokens at the offsets start to stop - 1, and do not wait.

        Who is about to read many windows says so of all of them first. A disk then reads them side
        by side, and not each when the one before has come. What lies outside the corpus is left
        out, as in a slice.
        """
        start = max(start, 0)
        index = bisect_right(self.mappings, start, key=lambda mapping: mapping.first) - 1
        while 0 <= index < len(self.mappings) and self.mappings[index].first < stop:
            self.mappings[index].will_need(start, stop)
            index += 1

    def counts(self, start: int, stop: int) -> np.ndarray:
        """Return which tokens at the offsets start to stop - 1 count as targets, float32 0 or 1."""
        if self.loss is None:
            return np.ones(stop - start, np.float32)
        return self.loss[start:stop].astype(np.float32)

    def has_tokenizer_of(self, other: "Corpus") -> bool:
        """Return whether the ids of both mean the same."""
        tokenizers = (self.tokenizer, other.tokenizer)
        prints = {tokenizer_fingerprint(each.spec() if each else None) for each in tokenizers}
        return self.vocab == other.vocab and len(prints) == 1

    def _refuse(self, offset: int, token: int):
        assert self.files, f"id {token} at {offset} of a corpus we made is beyond its vocabulary"
        file = bisect_right(self.files, offset, key=lambda file: file[0]) - 1
        first, path = self.files[file]
        raise DataError(
            f"{path}: id {token} at token offset {offset - first} "
            f"is beyond its vocabulary of {self.vocab}"
        )


class Mapping(NamedTuple):
    """A file of tokens that is mapped, the first of which stands at the offset `first`."""

    first: int
    itemsize: int  # bytes of a token
    content: mmap.mmap

    def will_need(self, start: int, stop: int) -> None:
        """Have the kernel read what lies here of the tokens start to stop - 1 of the corpus."""
        begin = max(start - self.first, 0) * self.itemsize
        end = min((stop - self.first) * self.itemsize, len(self.content))
        if begin >= end:
            return
        begin -= begin % mmap.PAGESIZE
        self.content.madvise(mmap.MADV_WILLNEED, begin, end - begin)


class Concatenated:
    """Several rows of tokens seen as one. It supports len(), and slices of step 1.

    A slice reads only the parts that it touches.
    """

    def __init__(self, parts: Sequence["np.ndarray | Unmapped"]):
        self.parts = parts  # none of them empty
        self.bounds = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1
        index = min(bisect_right(self.bounds, start), len(self.parts)) - 1
        pieces = []
        while not pieces or start < stop:  # an empty slice takes an empty piece, for its dtype
            first = self.bounds[index]
            end = self.bounds[index + 1]
            piece_stop = max(start, min(stop, end))
            pieces.append(self.parts[index][start - first : piece_stop - first])
            start = end
            index += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def find_vocab(config: DataConfig, seed: int) -> int:
    """Return how many ids the data has that `config` names: as many as any source of a mixture.

    Raises DataError as `open_corpus` does.
    """
    if config.mix:
        return token_corpus(_patterns(config.mix[0].path), config.tokenizer).vocab
    return open_corpus(config, None, seed).vocab


def open_corpus(config: DataConfig, vocab: int | None, seed: int) -> Corpus:
    """Open the corpus that `config` names, which is not a mixture.

    `vocab` is the model's, or None, if the model will take that of the corpus. `seed` is that of
    synthetic noise. Raises DataError where something is missing or damaged, or the corpus has ids
    that the model has no row for.
    """
    patterns = _patterns(config.path)
    if config.corpus == "stdlib":
        corpus = stdlib_corpus(config.tokenizer)
    elif config.corpus == "synthetic":
        corpus = synthetic_corpus(vocab, seed)
    elif config.corpus == "text":
        corpus = text_corpus(patterns, config.tokenizer)
    else:
        validation = _patterns(config.validation_path)
        corpus = token_corpus(patterns, config.tokenizer, vocab, validation)
    if vocab is not None and corpus.vocab > vocab:
        raise DataError(
            "the corpus has token ids that the model has no row for",
            asked=f"model.vocab={vocab}",
            found=f"{corpus.vocab} ids in the corpus",
            fix=f"--set model.vocab={corpus.vocab}",
        )
    return corpus


def _patterns(path: str | Sequence[str] | None) -> Sequence[str]:
    return (path,) if isinstance(path, str) else path or ()


def stdlib_corpus(tokenizer: str, root: Path | None = None, limit: int = STDLIB_BYTES) -> Corpus:
    """Take source files of the running Python's own library, at most `limit` bytes, as documents.

    Files are taken in the order of the hash of their relative path, so that the selection is spread
    over the library, and the same everywhere for one Python version. The documents are then sorted
    by path.
    """
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))

    def hash_of(path: str) -> bytes:
        return hashlib.sha256(path.encode()).digest()

    chosen: dict[str, bytes] = {}
    total = 0
    for path in sorted(_stdlib_sources(root), key=hash_of):
        text = _text_or_none(root / path)
        if text is None:
            continue
        total += len(text)
        if total > limit:
            break
        chosen[path] = text
    if not chosen:
        raise DataError(
            f"no Python source in {root}", fix="--set data.corpus=text --set data.path=FILE"
        )
    return _encode_texts([chosen[path].decode("utf-8") for path in sorted(chosen)], tokenizer)


def _stdlib_sources(root: Path) -> Iterator[str]:
    """Yield paths relative to root, with forward slashes."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_LEFT_OUT]
        relative = Path(folder).relative_to(root)
        for name in files:
            # These two are about one machine, not about Python.
            is_local = name.startswith("_sysconfigdata") or name.endswith("customize.py")
            if name.endswith(".py") and not is_local:
                yield (relative / name).as_posix()


def _text_or_none(path: Path) -> bytes | None:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except (
        UnicodeDecodeError
    ):  # a source file may declare another encoding; there is enough without it
        return None
    return content


def synthetic_corpus(vocab: int | None, seed: int) -> Corpus:
    """Make noise with structure: documents from a Markov chain of order 1 over at most 64 ids.

    P is a random permutation of the ids. After id s comes P[s + r], with s + r modulo the
    vocabulary, where r is 0, 1, 2 or 3 with probability 1/2, 1/4, 1/8, 1/8.

    Every r maps ids one to one, so all ids are equally frequent, and the loss of a model starts at
    ln(vocab). A token given the one before it holds 1.75 bits; a bigram table reaches that, and
    nothing can do better. `entropy` is the same in nats.

    The noise comes from counters and integer arithmetic, so it is the same everywhere.
    """
    vocab = min(vocab or SYNTHETIC_VOCAB, SYNTHETIC_VOCAB)
    successor = np.argsort(random_bits(seed, 0, np.arange(vocab)), kind="stable")
    shape = (SYNTHETIC_LENGTH, SYNTHETIC_DOCUMENTS)
    bits = random_bits(seed, 1, np.arange(math.prod(shape))).reshape(shape)
    shift = np.array([0, 0, 0, 0, 1, 1, 2, 3])[bits >> np.uint64(61)]  # r, of three bits
    walk = np.empty(shape, DTYPES[storage_dtype(vocab)])
    state = (bits[0] % np.uint64(vocab)).astype(np.int64)
    walk[0] = state
    for position in range(1, SYNTHETIC_LENGTH):
        state = successor[(state + shift[position]) % vocab]
        walk[position] = state
    tokens = np.ascontiguousarray(walk.T).reshape(-1)
    starts = np.arange(SYNTHETIC_DOCUMENTS, dtype=np.int64) * SYNTHETIC_LENGTH
    # With fewer than 4 ids several r lead to the same one.
    probability = np.bincount(np.arange(4) % vocab, weights=[0.5, 0.25, 0.125, 0.125])
    entropy = float(-(probability * np.log(probability)).sum()) + 0.0  # never -0.0
    return Corpus(
        tokens=tokens,
        document_starts=starts,
        vocab=vocab,
        tokenizer=None,
        fingerprint=_fingerprint(tokens, starts, vocab, None),
        entropy=entropy,
    )


def text_corpus(patterns: Iterable[str], tokenizer: str) -> Corpus:
    """Read text files, a document each, into memory.

    A large text is better prepared as a token file. Raises DataError for files that hold no plain
    text: they must be prepared.
    """
    files = find_files(patterns)
    for file in files:
        if format_of(file) != "text" or file.endswith(COMPRESSIONS):
            raise DataError(f"{file} is not plain text", fix=f"spmdtrain data prepare {file}")
    return _encode_texts([read_text(path) for path in files], tokenizer)


def token_corpus(
    patterns: Iterable[str],
    tokenizer: str = "bytes",
    vocab: int | None = None,
    validation: Iterable[str] = (),
) -> Corpus:
    """Open token files, one behind the other.

    Token files bring their own tokenizer. `tokenizer` only checks that it is the one expected; as
    "bytes" is the default, which nobody need have written, it is taken to expect nothing. Files of
    other programs bring none: theirs is `tokenizer`, or unknown, with `vocab` ids. The files that
    `validation` names come last, and validate.
    """
    training = [_with_ending(pattern) for pattern in patterns]
    validating = [_with_ending(pattern) for pattern in validation]
    sources = [_open_source(path) for path in find_files([*training, *validating])]
    num_training = len(find_files(training))
    kinds = [_tokenizer_of(source, tokenizer, vocab) for source in sources]
    first_vocab, spec = kinds[0]
    for source, (other_vocab, other_spec) in zip(sources, kinds, strict=True):
        same = tokenizer_fingerprint(other_spec) == tokenizer_fingerprint(spec)
        if other_vocab != first_vocab or not same:
            paths = f"{sources[0].path} and {source.path}"
            raise DataError(f"{paths} were made with different tokenizers")
    if tokenizer != "bytes" and spec:
        _check_tokenizer(tokenizer, spec, sources[0].path)

    mapped = len(sources) <= MOST_MAPPED
    tokens = Concatenated([source.tokens if mapped else source.unmapped for source in sources])
    loss = None
    if any(source.has_loss for source in sources):
        parts = [source.loss if mapped else source.unmapped_loss for source in sources]
        loss = Concatenated(parts)
    ends = {source.end_of_text for source in sources}
    offsets = tokens.bounds[:-1]  # at which each file starts
    documents = []
    files = []
    mappings = []
    for offset, source in zip(offsets, sources, strict=True):
        documents.append(offset + source.document_starts)
        files.append((offset, source.path))
        if mapped:
            mappings.append(Mapping(offset, source.dtype.itemsize, source.mapping))
    fingerprints = " ".join(source.fingerprint for source in sources)
    if validating:
        fingerprints += f" {num_training}"
    return Corpus(
        tokens=tokens.parts[0] if len(sources) == 1 else tokens,
        document_starts=np.concatenate(documents),
        vocab=first_vocab,
        tokenizer=from_spec(spec) if spec else None,
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        files=tuple(files),
        mappings=tuple(mappings),
        loss=loss,
        end_of_text=ends.pop() if len(ends) == 1 else None,
        has_documents=all(source.has_documents for source in sources),
        validation_start=tokens.bounds[num_training] if validating else None,
    )


def _with_ending(pattern: str) -> str:
    """Return the name of a token file that was named with or without its .bin."""
    is_stem = os.path.isfile(os.path.expanduser(pattern + ".bin"))
    return pattern + ".bin" if is_stem else pattern


def _open_source(path: str) -> TokenSource | ForeignTokens:
    bin_path, idx_path, json_path = token_paths(path)
    if is_foreign(bin_path, idx_path, json_path):
        return open_foreign(bin_path, idx_path)
    return open_tokens(path)


def _tokenizer_of(
    source: TokenSource | ForeignTokens, asked: str, vocab: int | None
) -> tuple[int, dict | None]:
    """Return (vocabulary, specification of the tokenizer) of a token file.

    One of another program has those that `data.tokenizer` and the model say.
    """
    if source.vocab is not None:
        return source.vocab, source.tokenizer_spec
    if asked not in ("bytes", "characters"):
        tokenizer = open_tokenizer(asked)
        return tokenizer.size, tokenizer.spec()
    if vocab is None:
        raise DataError(
            f"{source.path} does not say how many ids there are",
            fix="--set data.tokenizer=FILE, or --set model.vocab=50304",
        )
    return vocab, None


def _check_tokenizer(asked: str, spec: dict, path: str):
    """Refuse a token file at `path` whose tokenizer, of this spec, is not the one asked for."""
    if asked == spec.get("kind"):
        return
    if asked != "characters":  # which cannot be opened without a text
        asked_spec = open_tokenizer(asked).spec()
        if tokenizer_fingerprint(asked_spec) == tokenizer_fingerprint(spec):
            return
    made_with = spec.get("path") or spec.get("kind")
    raise DataError(
        f"{path} was made with another tokenizer",
        asked=f"data.tokenizer={asked!r}",
        found=f"{made_with!r}",
        fix="leaving data.tokenizer out: a token file brings its own",
    )


def _encode_texts(texts: list[str], tokenizer_name: str) -> Corpus:
    """Make a corpus of texts, a document each; one without tokens is left out."""
    tokenizer = open_tokenizer(tokenizer_name, texts)
    dtype = DTYPES[storage_dtype(tokenizer.size)]
    encoded = [tokenizer.encode(text).astype(dtype) for text in texts]
    documents = [ids for ids in encoded if len(ids)]
    if not documents:
        raise DataError(
            f"the corpus is empty: the tokenizer {tokenizer_name} makes no tokens of its text"
        )
    starts = np.cumsum([0] + [len(ids) for ids in documents[:-1]], dtype=np.int64)
    tokens = np.concatenate(documents)
    return Corpus(
        tokens=tokens,
        document_starts=starts,
        vocab=tokenizer.size,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(tokens, starts, tokenizer.size, tokenizer.spec()),
    )


def _fingerprint(tokens: np.ndarray, starts: np.ndarray, vocab: int, spec: dict | None) -> str:
    digest = hashlib.sha256(f"{vocab} {len(tokens)} {tokenizer_fingerprint(spec)}".encode())
    digest.update(np.ascontiguousarray(tokens).data)
    digest.update(np.ascontiguousarray(starts).data)
    return digest.hexdigest()
