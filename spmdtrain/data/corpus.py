"""Opens the corpora that `data.corpus` names: Python's library, noise, text files, token files.

A *corpus* is one long sequence of token ids, document after document. *Offsets* count tokens from
its start.
"""

import functools
import hashlib
import math
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.schema import DataConfig
from spmdtrain.data.shuffle import random_bits
from spmdtrain.data.token_files.rows import Concatenated, StoredRow, reading
from spmdtrain.data.token_files.tokens import (
    COUNTS,
    DTYPES,
    SECOND,
    TokenSource,
    beyond_vocabulary,
    loss_path,
    open_tokens,
    storage_dtype,
    token_paths,
)
from spmdtrain.data.tokenizers.text_ends import end_of_text
from spmdtrain.data.tokenizers.tokenizer import (
    Tokenizer,
    from_spec,
    open_tokenizer,
    tokenizer_fingerprint,
)

if TYPE_CHECKING:
    from spmdtrain.data.token_files.foreign_tokens import ForeignTokens

STDLIB_BYTES = 4_000_000  # the loss of a quick start visibly falls; read in a fraction of a second
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
    # Generated tables and legacy code.
    "encodings",
    "pydoc_data",
    "lib2to3",
    "idlelib",
    "ensurepip",
    "distutils",
}
SYNTHETIC_VOCAB = 64
SYNTHETIC_DOCUMENTS = 2048
SYNTHETIC_LENGTH = 512  # of each document


@dataclass(frozen=True)
class Corpus:
    """A corpus: token ids, the starts of their documents, and a fingerprint."""

    # [tokens] uint16 or uint32; supports len() and slices
    tokens: np.ndarray | StoredRow | Concatenated
    document_starts: np.ndarray  # int64 offsets, strictly increasing, the first is 0
    vocab: int  # ids are < vocab
    tokenizer: Tokenizer | None  # None: the ids do not stand for text
    fingerprint: str  # hex; changes with content and tokenizer
    entropy: float | None = None  # lower bound of any model's loss, nats per token, if known
    files: tuple[tuple[int, str], ...] = ()  # (first offset, path) of each file, for messages
    file_offsets: tuple[int, ...] = ()  # where each of `files` begins within its file; (): all at 0
    # (first offset, rows that begin there) for each file, in order
    rows: tuple[tuple[int, tuple[StoredRow, ...]], ...] = ()
    # [tokens] uint8, COUNTS: counts, SECOND: of the second of a pair; None: all count
    loss: np.ndarray | StoredRow | Concatenated | None = None
    begin_of_text: int | None = None  # the id that begins each document, if any
    end_of_text: int | None = None  # the id that ends each document, if any
    has_pairs: bool = False  # each document is a pair of conversations
    # [documents, 2] float32, log-probabilities of a pair's answers; None: not known
    references: np.ndarray | None = None
    template: str | dict | None = None  # the spec of the template, if there are conversations
    has_documents: bool = True  # whether `document_starts` are known
    validation_start: int | None = None  # first validation token, if files validate

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids at the offsets start to stop - 1, int32.

        Raises DataError if an id is outside the vocabulary: it would have no row in the table.
        """
        if start < 0:
            raise DataError("an offset of tokens is not below 0", found=str(start))
        ids = self.tokens[start:stop]
        outside = ids >= self.vocab
        if outside.any():
            first = int(outside.argmax())
            self._refuse(start + first, int(ids[first]))
        return ids.astype(np.int32)

    def will_need(self, start: int, stop: int) -> None:
        """Asks the kernel to read the tokens at the offsets start to stop - 1, without waiting.

        Call it for all windows before reading many of them: the disk then reads them concurrently
        rather than one after another. Offsets outside the corpus are ignored, as in a slice.
        """
        index = max(bisect_right(self.rows, start, key=lambda entry: entry[0]) - 1, 0)
        while index < len(self.rows) and self.rows[index][0] < stop:
            first, rows = self.rows[index]
            for row in rows:
                row.will_need(start - first, stop - first)
            index += 1

    def counts(self, start: int, stop: int) -> np.ndarray:
        """Returns which tokens at the offsets start to stop - 1 count as targets, float32 0 or 1.

        Raises DataError if a stored mark is neither.
        """
        if self.loss is None:
            return np.ones(stop - start, np.float32)
        return (self._marks(start, stop) & COUNTS).astype(np.float32)

    def halves(self, start: int, stop: int) -> np.ndarray:
        """Returns the conversation of its pair that each token belongs to, int32 0 or 1.

        Raises DataError if a stored mark is neither.
        """
        return (self._marks(start, stop) // SECOND).astype(np.int32)

    def _marks(self, start: int, stop: int) -> np.ndarray:
        assert self.loss is not None, "it has marks"
        marks = self.loss[start:stop]
        largest = COUNTS + SECOND * self.has_pairs
        if marks.max(initial=0) > largest:
            path, offset = self._place(start + int((marks > largest).argmax()))
            raise DataError(
                f"{loss_path(path)} is damaged: its mark at token offset {offset} is not "
                f"{'from 0 to 3' if self.has_pairs else '0 or 1'}"
            )
        return marks

    def has_tokenizer_of(self, other: "Corpus") -> bool:
        """Returns True if ids mean the same in both corpora."""
        tokenizers = (self.tokenizer, other.tokenizer)
        prints = {
            tokenizer_fingerprint(tokenizer.spec() if tokenizer else None)
            for tokenizer in tokenizers
        }
        return self.vocab == other.vocab and len(prints) == 1

    def _refuse(self, offset: int, token: int):
        assert self.files, f"id {token} at {offset} of a corpus we made is beyond its vocabulary"
        path, place = self._place(offset)
        raise beyond_vocabulary(path, token, place, self.vocab)

    def _place(self, offset: int) -> tuple[str, int]:
        """Returns the file of the token at an offset, and its offset there."""
        file = bisect_right(self.files, offset, key=lambda file: file[0]) - 1
        first, path = self.files[file]
        skipped = self.file_offsets[file] if self.file_offsets else 0
        return path, skipped + offset - first


def find_vocab(config: DataConfig, seed: int) -> int:
    """Returns the vocabulary size of the data that `config` names; of a mixture, of any source.

    Raises DataError as `open_corpus` does. Of a stream only the tokenizer is opened.
    """
    if config.is_streamed:
        opened, _ = end_of_text(open_tokenizer(config.tokenizer), "auto", config.tokenizer)
        return opened.size
    if config.mix:
        path = _patterns(config.mix[0].path)
        return token_corpus(path, config.tokenizer, dtype=config.dtype).vocab
    return open_corpus(config, None, seed).vocab


class CorpusRequest(NamedTuple):
    """The arguments of `open_corpus`, which each kind of corpus needs some of."""

    settings: DataConfig
    vocab: int | None
    seed: int
    references: bool


def _open_stdlib(request: CorpusRequest) -> Corpus:
    return stdlib_corpus(request.settings.tokenizer)


def _open_synthetic(request: CorpusRequest) -> Corpus:
    return synthetic_corpus(request.vocab, request.seed)


def _open_text(request: CorpusRequest) -> Corpus:
    return text_corpus(_patterns(request.settings.path), request.settings.tokenizer)


def _open_tokens(request: CorpusRequest) -> Corpus:
    settings = request.settings
    return token_corpus(
        _patterns(settings.path),
        settings.tokenizer,
        request.vocab,
        _patterns(settings.validation_path),
        settings.dtype,
        references=request.references,
    )


# `data.corpus` -> how it is opened, except for streams (streams/stream_data.py).
CORPORA: Mapping[str, Callable[[CorpusRequest], Corpus]] = {
    "stdlib": _open_stdlib,
    "synthetic": _open_synthetic,
    "text": _open_text,
    "tokens": _open_tokens,
}


def open_corpus(
    config: DataConfig, vocab: int | None, seed: int, *, references: bool = False
) -> Corpus:
    """Opens the corpus that `config` names, which is neither a mixture nor a stream.

    `vocab` is the model's, or None if the model will adopt that of the corpus. `seed` is for
    synthetic noise, `references` as in `token_corpus`. Raises DataError if something is missing or
    damaged, or if the corpus has ids that the model has no row for.
    """
    corpus = CORPORA[config.corpus](CorpusRequest(config, vocab, seed, references))
    check_vocab(corpus.vocab, vocab)
    return corpus


def check_vocab(ids: int, rows: int | None) -> None:
    """Raises DataError if a corpus has more ids than the model has rows (None: it adopts them)."""
    if rows is not None and ids > rows:
        raise DataError(
            "the corpus has token ids that the model has no row for",
            asked=f"model.vocab={rows}",
            found=f"{ids} ids in the corpus",
            fix=f"--set model.vocab={ids}",
        )


def _patterns(path: str | Sequence[str] | None) -> Sequence[str]:
    return (path,) if isinstance(path, str) else path or ()


def stdlib_corpus(tokenizer: str, root: Path | None = None, limit: int = STDLIB_BYTES) -> Corpus:
    """Returns a corpus of the running Python's library source files, at most `limit` bytes.

    Each file is a document. Files are selected in the order of the hash of their relative path, so
    the selection is spread over the library and the same everywhere for one Python version. The
    documents are then sorted by path.
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
    """Yields paths relative to root, with forward slashes."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_LEFT_OUT]
        relative = Path(folder).relative_to(root)
        for name in files:
            # These two describe one machine, not Python.
            is_local = name.startswith("_sysconfigdata") or name.endswith("customize.py")
            if name.endswith(".py") and not is_local:
                yield (relative / name).as_posix()


def _text_or_none(path: Path) -> bytes | None:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:  # a source may declare another encoding; the rest is enough
        return None
    return content


@functools.lru_cache(maxsize=2)
def synthetic_corpus(vocab: int | None, seed: int) -> Corpus:
    """Generates structured noise: documents from a first-order Markov chain over at most 64 ids.

    P is a random permutation of the ids. After id s comes P[s + r], with s + r modulo the
    vocabulary, where r is 0, 1, 2 or 3 with probability 1/2, 1/4, 1/8, 1/8.

    Every r maps ids one to one, so all ids are equally frequent and a model's loss starts at
    ln(vocab). A token given the previous one carries 1.75 bits; a bigram table reaches that, and
    nothing can do better. `entropy` is the same in nats.

    The noise comes from counters and integer arithmetic, so it is the same on every machine.
    """
    vocab = min(vocab or SYNTHETIC_VOCAB, SYNTHETIC_VOCAB)
    successor = np.argsort(random_bits(seed, 0, np.arange(vocab)), kind="stable")
    shape = (SYNTHETIC_LENGTH, SYNTHETIC_DOCUMENTS)
    bits = random_bits(seed, 1, np.arange(math.prod(shape))).reshape(shape)
    shift = np.array([0, 0, 0, 0, 1, 1, 2, 3])[bits >> np.uint64(61)]  # r, from three bits
    walk = np.empty(shape, DTYPES[storage_dtype(vocab)])
    state = (bits[0] % np.uint64(vocab)).astype(np.int64)
    walk[0] = state
    for position in range(1, SYNTHETIC_LENGTH):
        state = successor[(state + shift[position]) % vocab]
        walk[position] = state
    tokens = np.ascontiguousarray(walk.T).reshape(-1)
    starts = np.arange(SYNTHETIC_DOCUMENTS, dtype=np.int64) * SYNTHETIC_LENGTH
    tokens.setflags(write=False)
    starts.setflags(write=False)
    # With fewer than 4 ids, several r lead to the same id.
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
    """Reads text files into memory, one document each.

    Large texts are better prepared as a token file. Raises DataError for files that are not plain
    text: they must be prepared.
    """
    from spmdtrain.data.texts.compressed import compression_of
    from spmdtrain.data.texts.documents import command_to_prepare, format_of
    from spmdtrain.data.texts.files import find_files, read_text

    files = find_files(patterns)
    for file in files:
        if format_of(file) != "text" or compression_of(file):
            raise DataError(f"{file} is not plain text", fix=command_to_prepare(file))
    return _encode_texts([read_text(path) for path in files], tokenizer)


def token_corpus(
    patterns: Iterable[str],
    tokenizer: str = "bytes",
    vocab: int | None = None,
    validation: Iterable[str] = (),
    dtype: str | None = None,
    *,
    references: bool = False,
) -> Corpus:
    """Opens token files as one corpus, one after another.

    Our token files carry their tokenizer; `tokenizer` only checks it. The default "bytes" checks
    nothing, since nobody may have chosen it. Files of other programs carry none: theirs is
    `tokenizer`, or unknown with `vocab` ids. `dtype` is the type of the ids in files that do not
    declare it. The files named by `validation` come last and validate. With `references`, a
    reference model's log-probabilities of pairs are read too, if all files have them.
    """
    from spmdtrain.data.texts.files import find_files

    training = [_with_ending(pattern) for pattern in patterns]
    validating = [_with_ending(pattern) for pattern in validation]
    paths = find_files([*training, *validating])
    num_training = len(find_files(training))
    if validating:
        _refuse_copies(paths[:num_training], paths[num_training:])
    theirs = lru_cache(maxsize=1)(open_tokenizer)  # read once for all files
    sources: list[TokenSource | ForeignTokens] = []
    kinds: list[tuple[int, dict | None]] = []
    for path in paths:
        with reading(path):
            source, kind = _open_source(path, tokenizer, vocab, dtype, theirs)
        sources.append(source)
        kinds.append(kind)
    first_vocab, spec = kinds[0]
    for source, (other_vocab, other_spec) in zip(sources, kinds, strict=True):
        same = tokenizer_fingerprint(other_spec) == tokenizer_fingerprint(spec)
        if other_vocab != first_vocab or not same:
            both = f"{sources[0].path} and {source.path}"
            raise DataError(f"{both} were made with different tokenizers")
    if tokenizer != "bytes" and spec:
        _check_tokenizer(tokenizer, spec, sources[0].path)
    corpus = _joined(sources, first_vocab, spec, num_training if validating else None)
    return _with_references(corpus, sources) if references and corpus.has_pairs else corpus


def _refuse_copies(training: Sequence[str], validating: Sequence[str]) -> None:
    """Raises DataError if a validation file has the same content as a training file."""
    from spmdtrain.data.token_files.blocks import contents

    content = contents({path: path for path in (*training, *validating)})
    trained = {content[path]: path for path in training}
    for path in validating:
        if content[path] in trained:
            raise DataError(
                f"data.validation_path: {path} is a copy of {trained[content[path]]}, which trains",
                fix="other files, or data.validation_fraction",
            )


def _joined(
    sources: "Sequence[TokenSource | ForeignTokens]",
    vocab: int,
    spec: dict | None,
    num_training: int | None,
) -> Corpus:
    """Returns one corpus of all files, of which the first `num_training` train (None: all)."""
    tokens = Concatenated([source.row for source in sources])
    offsets = tokens.bounds[:-1]  # at which each file starts
    loss = None
    if any(source.has_loss for source in sources):
        one = np.uint8(1)
        parts = [
            np.broadcast_to(one, len(source.row)) if source.loss_row is None else source.loss_row
            for source in sources
        ]
        loss = parts[0] if len(parts) == 1 else Concatenated(parts)
    rows = [
        (source.row,) if source.loss_row is None else (source.row, source.loss_row)
        for source in sources
    ]
    starts = [
        offset + source.document_starts for offset, source in zip(offsets, sources, strict=True)
    ]
    begins = {source.begin_of_text for source in sources}
    ends = {source.end_of_text for source in sources}
    has_pairs = sources[0].has_pairs
    for source in sources:
        if source.has_pairs != has_pairs:
            both = f"{sources[0].path} and {source.path}"
            raise DataError(f"{both} cannot be one corpus: only one of them holds pairs")

    def united(fingerprints: Iterable[str]) -> str:
        text = " ".join(fingerprints)
        if num_training is not None:
            text += f" {num_training}"
        return hashlib.sha256(text.encode()).hexdigest()

    return Corpus(
        tokens=tokens.parts[0] if len(sources) == 1 else tokens,
        document_starts=np.concatenate(starts),
        vocab=vocab,
        tokenizer=from_spec(spec) if spec else None,
        fingerprint=united(source.fingerprint for source in sources),
        files=tuple((at, source.path) for at, source in zip(offsets, sources, strict=True)),
        rows=tuple(zip(offsets, rows, strict=True)),
        loss=loss,
        begin_of_text=begins.pop() if len(begins) == 1 else None,
        end_of_text=ends.pop() if len(ends) == 1 else None,
        has_pairs=has_pairs,
        template=common_template(source.template for source in sources),
        has_documents=all(source.has_documents for source in sources),
        validation_start=None if num_training is None else tokens.bounds[num_training],
    )


def _with_references(corpus: Corpus, sources: "Sequence[TokenSource | ForeignTokens]") -> Corpus:
    """Returns a corpus of pairs with its log-probabilities, if all of its files have them.

    They are float32 [documents, 2], and change the fingerprint.
    """
    from spmdtrain.data.token_files.references import read_references

    read = [read_references(source) for source in sources if isinstance(source, TokenSource)]
    parts = [part for part in read if part is not None]
    if len(parts) < len(sources):
        return corpus
    references = np.concatenate(parts)
    digest = hashlib.sha256(corpus.fingerprint.encode() + references.tobytes())
    return replace(corpus, references=references, fingerprint=digest.hexdigest())


def common_template(templates: Iterable[str | dict | None]) -> str | dict | None:
    """Returns the template shared by all sources with conversations; None if there are several."""
    specs = [template for template in templates if template]
    return specs[0] if specs and specs.count(specs[0]) == len(specs) else None


def _with_ending(pattern: str) -> str:
    """Returns the full name of a token file, which may be named without its .bin."""
    is_stem = os.path.isfile(os.path.expanduser(pattern + ".bin"))
    return pattern + ".bin" if is_stem else pattern


def _open_source(
    path: str,
    tokenizer: str,
    vocab: int | None,
    dtype: str | None,
    open_theirs: Callable[[str], Tokenizer],
) -> "tuple[TokenSource | ForeignTokens, tuple[int, dict | None]]":
    """Returns a token file, its vocabulary, and the spec of its tokenizer.

    For a file of another program, `data.tokenizer` and the model determine both.
    """
    from spmdtrain.data.token_files.datatrove_file import ENDING, open_datatrove
    from spmdtrain.data.token_files.foreign_tokens import is_foreign, open_foreign

    bin_path, idx_path, json_path = token_paths(path)
    is_datatrove = path.endswith(ENDING)
    if not is_datatrove and not is_foreign(bin_path, idx_path, json_path):
        source = open_tokens(path)
        if dtype and source.dtype != DTYPES[dtype]:
            raise DataError(
                f"{path} itself states the type of its ids",
                asked=f"data.dtype={dtype}",
                found=source.sidecar["dtype"],
                fix="leaving data.dtype out",
            )
        return source, (source.vocab, source.tokenizer_spec)
    spec = None
    if tokenizer not in ("bytes", "characters"):
        opened = open_theirs(tokenizer)
        vocab = opened.size
        spec = opened.spec()
    if vocab is None:
        raise DataError(
            f"{path} does not state the number of ids",
            fix="--set data.tokenizer=FILE, or --set model.vocab=50304",
        )
    if is_datatrove:
        return open_datatrove(Path(path), vocab, dtype), (vocab, spec)
    return open_foreign(bin_path, idx_path, vocab, dtype), (vocab, spec)


def _check_tokenizer(name: str, spec: dict, path: str):
    """Raises DataError if the file at `path` has another tokenizer (`spec`) than the named one."""
    if name == spec.get("kind"):
        return
    if name != "characters":  # cannot be opened without a text
        named_spec = open_tokenizer(name).spec()
        if tokenizer_fingerprint(named_spec) == tokenizer_fingerprint(spec):
            return
    made_with = spec.get("path") or spec.get("kind")
    raise DataError(
        f"{path} was made with another tokenizer",
        asked=f"data.tokenizer={name!r}",
        found=f"{made_with!r}",
        fix="leaving data.tokenizer out: a token file has its own",
    )


def _encode_texts(texts: list[str], tokenizer_name: str) -> Corpus:
    """Returns a corpus with a document for each text; texts without tokens are left out."""
    tokenizer = open_tokenizer(tokenizer_name, texts)
    dtype = DTYPES[storage_dtype(tokenizer.size)]
    encoded = [tokenizer.encode(text, parse_special=False).astype(dtype) for text in texts]
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
