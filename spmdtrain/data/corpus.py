"""The corpora a run can name: token ids, where documents start in them, and a fingerprint.

A *corpus* is one long row of token ids, document after document. *Offsets* count tokens from its start.
"""

import difflib
import glob
import hashlib
import math
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.shuffle import random_bits
from spmdtrain.data.tokenizer import Tokenizer, from_spec, open_tokenizer, tokenizer_fingerprint
from spmdtrain.data.tokens import DTYPES, TokenSource, Unmapped, open_tokens, storage_dtype

STDLIB_BYTES = 4_000_000  # enough for a quick start to fall visibly, read in a fraction of a second
STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "lib-dynload"),  # not the library's source
    *("test", "tests", "idle_test", "turtledemo"),  # tests, some of them not even valid text
    *("encodings", "pydoc_data", "lib2to3", "idlelib", "ensurepip", "distutils"),  # generated tables, relics
}
# A mapping holds its file open, and a process may have 1024, on some systems 256. Where there are
# more, each is opened to be read.
MOST_MAPPED = 128
SYNTHETIC_VOCAB, SYNTHETIC_DOCUMENTS, SYNTHETIC_LENGTH = 64, 2048, 512


@dataclass(frozen=True)
class Corpus:
    tokens: "np.ndarray | Concatenated"  # [tokens] uint16 or uint32; supports len() and slices
    document_starts: np.ndarray  # int64 offsets, strictly increasing, the first is 0
    vocab: int  # ids are < vocab
    tokenizer: Tokenizer | None  # None: the ids mean no text
    fingerprint: str  # hex; changes with content and tokenizer
    entropy: float | None = None  # nats per token that no model can beat, where it is known
    files: tuple[tuple[int, str], ...] = ()  # (first offset, path) of mapped files, for messages

    def read(self, start: int, stop: int) -> np.ndarray:
        """int32 ids of the offsets start..stop-1, every one checked to lie inside the vocabulary."""
        ids = self.tokens[start:stop]
        if (bad := ids >= self.vocab).any():
            self._refuse(start + int(bad.argmax()), int(ids[bad.argmax()]))
        return ids.astype(np.int32)

    def _refuse(self, offset: int, token: int):
        assert self.files, f"id {token} at {offset} of a corpus of our own making is beyond its vocabulary"
        first, path = self.files[bisect_right(self.files, offset, key=lambda file: file[0]) - 1]
        raise DataError(f"{path}: id {token} at token offset {offset - first} is beyond its vocabulary of {self.vocab}")


class Concatenated:
    """Several rows of tokens seen as one, sliced with step 1. A slice asks no part but its own."""

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
        while not pieces or start < stop:
            first, end = self.bounds[index], self.bounds[index + 1]
            pieces.append(self.parts[index][start - first : max(start, min(stop, end)) - first])
            start, index = end, index + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def open_corpus(config: DataConfig, vocab: int | None, seed: int) -> Corpus:
    """The corpus that `config` names. `vocab` is the model's (None: it will take the corpus's); `seed` makes noise."""
    patterns = (config.path,) if isinstance(config.path, str) else config.path or ()
    if config.corpus == "stdlib":
        corpus = stdlib_corpus(config.tokenizer)
    elif config.corpus == "synthetic":
        corpus = synthetic_corpus(vocab, seed)
    elif config.corpus == "text":
        corpus = text_corpus(patterns, config.tokenizer)
    else:
        corpus = token_corpus(patterns, config.tokenizer)
    if vocab is not None and corpus.vocab > vocab:
        raise DataError(
            "the corpus has token ids that the model has no row for",
            asked=f"model.vocab={vocab}",
            found=f"{corpus.vocab} ids in data.corpus={config.corpus!r}",
            fix=f"--set model.vocab={corpus.vocab}",
        )
    return corpus


def stdlib_corpus(tokenizer: str, root: Path | None = None, limit: int = STDLIB_BYTES) -> Corpus:
    """Source files of the running Python's own library, at most `limit` bytes, one document each, sorted by path.

    Which files are taken is decided by the hash of their relative path, so the selection is spread over the library
    and the same everywhere for one Python version.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    chosen, total = {}, 0
    for path in sorted(_stdlib_sources(root), key=lambda path: hashlib.sha256(path.encode()).digest()):
        text = _text_or_none(root / path)
        if text is None:
            continue
        total += len(text)
        if total > limit:
            break
        chosen[path] = text
    if not chosen:
        raise DataError(f"no Python source in {root}", fix="--set data.corpus=text --set data.path=FILE")
    return _encoded([chosen[path].decode("utf-8") for path in sorted(chosen)], tokenizer)


def _stdlib_sources(root: Path) -> Iterator[str]:
    """Paths relative to root, with forward slashes."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_LEFT_OUT]
        relative = Path(folder).relative_to(root)
        for name in files:
            # _sysconfigdata_* and *customize.py tell about one machine, not about Python
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and not name.endswith("customize.py"):
                yield (relative / name).as_posix()


def _text_or_none(path: Path) -> bytes | None:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:  # a source file may declare another encoding; there is enough without it
        return None
    return content


def synthetic_corpus(vocab: int | None, seed: int) -> Corpus:
    """Noise with structure: documents walked by a Markov chain of order 1 over at most 64 ids.

    A fixed random permutation P leads on: after id s comes P[s + r] (s + r modulo the vocabulary) where r is 0, 1, 2
    or 3 with probability 1/2, 1/4, 1/8, 1/8. Every r maps ids one to one, so all ids are equally frequent (a model
    starts at ln(vocab)) and a token given the one before holds 1.75 bits: `entropy`, in nats, which a bigram table
    reaches. Made from counters and integers, so it is the same everywhere.
    """
    vocab = min(vocab or SYNTHETIC_VOCAB, SYNTHETIC_VOCAB)
    successor = np.argsort(random_bits(seed, 0, np.arange(vocab)), kind="stable")
    shape = (SYNTHETIC_LENGTH, SYNTHETIC_DOCUMENTS)
    bits = random_bits(seed, 1, np.arange(math.prod(shape))).reshape(shape)
    shift = np.array([0, 0, 0, 0, 1, 1, 2, 3])[bits >> np.uint64(61)]
    walk = np.empty(shape, DTYPES[storage_dtype(vocab)])
    state = (bits[0] % np.uint64(vocab)).astype(np.int64)
    walk[0] = state
    for position in range(1, SYNTHETIC_LENGTH):
        state = successor[(state + shift[position]) % vocab]
        walk[position] = state
    tokens = np.ascontiguousarray(walk.T).reshape(-1)
    starts = np.arange(SYNTHETIC_DOCUMENTS, dtype=np.int64) * SYNTHETIC_LENGTH
    probability = np.bincount(np.arange(4) % vocab, weights=[0.5, 0.25, 0.125, 0.125])  # a tiny vocab folds them
    entropy = float(-(probability * np.log(probability)).sum()) + 0.0
    return Corpus(tokens, starts, vocab, None, _fingerprint(tokens, starts, vocab, None), entropy)


def text_corpus(patterns: Iterable[str], tokenizer: str) -> Corpus:
    """Text files, one document each, held in memory; a large text is better prepared as a token file."""
    return _encoded([read_text(path) for path in find_files(patterns)], tokenizer)


def token_corpus(patterns: Iterable[str], tokenizer: str = "bytes") -> Corpus:
    """Token files, one after the other. `tokenizer` only checks: the files' own is what counts, and it may be a
    default that nobody wrote, so `bytes` is taken to ask for nothing."""
    named = [
        pattern + ".bin" if os.path.isfile(os.path.expanduser(pattern + ".bin")) else pattern for pattern in patterns
    ]
    sources = [open_tokens(path) for path in find_files(named)]
    tokenizer_of_all = _tokenizer_of(sources[0])
    for source in sources[1:]:
        if _tokenizer_of(source) != tokenizer_of_all:
            raise DataError(f"{sources[0].path} and {source.path} were made with different tokenizers")
    spec = sources[0].tokenizer_spec
    if tokenizer != "bytes" and spec:
        _check_tokenizer(tokenizer, spec, sources[0].path)
    mapped = len(sources) <= MOST_MAPPED
    tokens = Concatenated([source.tokens if mapped else source.unmapped for source in sources])
    first = list(zip(tokens.bounds, sources, strict=False))
    return Corpus(
        tokens=tokens.parts[0] if len(sources) == 1 else tokens,
        document_starts=np.concatenate([start + source.document_starts for start, source in first]),
        vocab=sources[0].vocab,
        tokenizer=from_spec(spec) if spec else None,
        fingerprint=hashlib.sha256(" ".join(source.fingerprint for source in sources).encode()).hexdigest(),
        files=tuple((start, source.path) for start, source in first),
    )


def _tokenizer_of(source: TokenSource) -> tuple:
    return source.vocab, tokenizer_fingerprint(source.tokenizer_spec)


def _check_tokenizer(asked: str, spec: dict, path: str):
    if asked == spec.get("kind"):
        return
    if asked == "characters" or tokenizer_fingerprint(open_tokenizer(asked).spec()) != tokenizer_fingerprint(spec):
        made_with = spec.get("path") or spec.get("kind")
        raise DataError(
            f"{path} was made with another tokenizer",
            asked=f"data.tokenizer={asked!r}",
            found=f"{made_with!r}",
            fix="leaving data.tokenizer out: a token file brings its own",
        )


def find_files(patterns: Iterable[str]) -> list[str]:
    """Existing files or globs (`**` too) as paths: patterns in the order given, a glob's files sorted, none twice."""
    found: dict[str, None] = {}
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            raise DataError(f"{pattern} is a folder", fix=f"{os.path.join(pattern, '**', '*.txt')}")
        literal = os.path.isfile(expanded)
        matches = [expanded] if literal else sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
        if not matches:
            folder, name = os.path.split(expanded)
            near = difflib.get_close_matches(name, os.listdir(folder or ".") if os.path.isdir(folder or ".") else (), 1)
            raise DataError(f"no file matches {pattern}", fix=os.path.join(folder, near[0]) if near else "")
        found.update(dict.fromkeys(matches))
    return list(found)


def read_text(path: str) -> str:
    """A whole UTF-8 file, line ends untouched."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _encoded(texts: list[str], name: str) -> Corpus:
    tokenizer = open_tokenizer(name, texts)
    dtype = DTYPES[storage_dtype(tokenizer.size)]
    documents = [ids for text in texts if len(ids := tokenizer.encode(text).astype(dtype))]
    if not documents:
        raise DataError(f"the corpus is empty: the tokenizer {name} makes no tokens of its text")
    starts = np.cumsum([0] + [len(ids) for ids in documents[:-1]], dtype=np.int64)
    tokens = np.concatenate(documents)
    return Corpus(
        tokens, starts, tokenizer.size, tokenizer, _fingerprint(tokens, starts, tokenizer.size, tokenizer.spec())
    )


def _fingerprint(tokens: np.ndarray, starts: np.ndarray, vocab: int, spec: dict | None) -> str:
    digest = hashlib.sha256(f"{vocab} {len(tokens)} {tokenizer_fingerprint(spec)}".encode())
    digest.update(np.ascontiguousarray(tokens))
    digest.update(np.ascontiguousarray(starts))
    return digest.hexdigest()
