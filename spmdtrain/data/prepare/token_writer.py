"""Writes token files in the format that tokens.py describes."""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import read_named
from spmdtrain.config.writing import replacing, writing
from spmdtrain.data.prepare.encode import Encoded
from spmdtrain.data.prepare.notes import COUNTED
from spmdtrain.data.token_files.tokens import (
    COUNTS,
    DTYPES,
    VERSION,
    loss_path,
    storage_dtype,
    token_paths,
)
from spmdtrain.data.tokenizers.tokenizer import Tokenizer

LARGEST_TOKENIZER = 2**30  # bytes of its file


@dataclass(frozen=True)
class Summary:
    """The counts and the dtype of a finished token file."""

    path: str  # of the .bin
    documents: int
    tokens: int
    text_bytes: int
    vocab: int
    dtype: str
    learned: int | None = None  # tokens that count in the loss; None: all do
    spelling: int = 0  # documents that spell out a special token
    holding_end: int = 0  # documents that contain the end of text
    # Conversations, as notes.py says of each kind of note.
    with_gaps: int = 0
    never_ending: int = 0
    quoting: int = 0
    repeating: int = 0


class TokenWriter:
    """A token file being written. Call `finish()` at the end, and `close()` in any case.

    Everything is written under temporary names first, so an interruption leaves nothing under the
    final ones.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        end_of_text: int | None,
        with_loss: bool,
        spec: dict | None = None,
        template: str | dict | None = None,
        has_pairs: bool = False,
        *,
        begin_of_text: int | None = None,
    ):
        """Opens the files.

        `spec` replaces the tokenizer's own if several files share its content. `template` is the
        spec of the chat template; `has_pairs` says that documents are pairs of conversations.
        Raises StorageError if the file cannot be written.
        """
        self._tokenizer = tokenizer
        self._spec = tokenizer.spec() if spec is None else spec
        self._begin_of_text = begin_of_text
        self._end_of_text = end_of_text
        self._finals = [*token_paths(path)]
        self._template = template
        self._has_pairs = has_pairs
        self._with_loss = with_loss
        if with_loss:
            self._finals.insert(0, loss_path(path))  # the sidecar stays last
        self._partials = [
            final.with_name(f".{final.name}.{os.getpid()}.partial") for final in self._finals
        ]
        self.documents = 0
        self.tokens = 0
        self._text_bytes = 0
        self._learned = 0
        self._noted = dict.fromkeys(COUNTED, 0)
        self._files: dict[str, io.BufferedWriter] = {}
        self._hashes = {}
        with writing(self.path):
            self._finals[0].parent.mkdir(parents=True, exist_ok=True)
            for final, partial in zip(self._finals[:-1], self._partials, strict=False):
                self._files[final.suffix] = partial.open("wb")
                self._hashes[final.suffix] = hashlib.sha256()

    @property
    def learned(self) -> int | None:
        """The number of tokens so far that count in the loss; None: all do."""
        return self._learned if self._with_loss else None

    @property
    def path(self) -> Path:
        """The final path of the .bin."""
        return self._finals[-3]

    def write(self, encoded: Encoded) -> None:
        """Appends documents. Raises StorageError if they cannot be written."""
        lengths = encoded.lengths[encoded.lengths > 0]
        starts = self.tokens + np.cumsum(lengths) - lengths
        with writing(self.path):
            self._append(".bin", encoded.ids.tobytes())
            self._append(".idx", starts.astype("<i8").tobytes())
            if ".loss" in self._files:
                assert encoded.loss is not None, "conversations say which tokens count"
                self._append(".loss", encoded.loss.tobytes())
                self._learned += int(np.count_nonzero(encoded.loss & COUNTS))
        if encoded.notes is not None:
            for name, note in COUNTED.items():
                self._noted[name] += int(np.count_nonzero(encoded.notes & note))
        self.documents += len(lengths)
        self.tokens += len(encoded.ids)
        self._text_bytes += int(encoded.text_bytes.sum())

    def _append(self, suffix: str, content: bytes) -> None:
        self._files[suffix].write(content)
        self._hashes[suffix].update(content)

    def finish(self) -> Summary:
        """Puts the complete file in place and returns its summary.

        Raises StorageError if it cannot be written.
        """
        vocab = self._tokenizer.size
        dtype = storage_dtype(vocab)
        sidecar = {
            "version": VERSION,
            "dtype": dtype,
            "tokens": self.tokens,
            "documents": self.documents,
            "vocab": vocab,
            "begin_of_text": self._begin_of_text,
            "end_of_text": self._end_of_text,
            "text_bytes": self._text_bytes,
            "sha256": self._hashes[".bin"].hexdigest(),
            "index_sha256": self._hashes[".idx"].hexdigest(),
            "tokenizer": self._spec,
        }
        if ".loss" in self._hashes:
            sidecar["loss_sha256"] = self._hashes[".loss"].hexdigest()
            sidecar["template"] = self._template
            sidecar["pairs"] = self._has_pairs
        with writing(self.path):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            content = json.dumps(sidecar, indent=1) + "\n"
            self._partials[-1].write_text(content, encoding="utf-8")
            for partial, final in zip(self._partials, self._finals, strict=True):
                os.replace(partial, final)
        return Summary(
            str(self.path),
            self.documents,
            self.tokens,
            self._text_bytes,
            vocab,
            dtype,
            self.learned,
            **self._noted,
        )

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Discards the files that `finish` has not put in place."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # unwritten content is discarded
                file.close()
        for partial in filter(os.path.exists, self._partials):
            partial.unlink()


def share_tokenizer(out: str, tokenizer: Tokenizer) -> dict:
    """Writes a tokenizer's content next to the files `out`, and returns the spec naming it.

    A tokenizer that has no file keeps its spec. Raises StorageError if it cannot be written.
    """
    spec = tokenizer.spec()
    if "json" not in spec:
        return spec
    path = Path(os.path.expanduser(out))
    path = path.parent / f"{path.name}.tokenizer.json"
    _refuse_other_content(path, spec["json"])
    with replacing(path) as spare:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare.write_text(spec.pop("json"), encoding="utf-8")
    return spec | {"file": path.name}


def _refuse_other_content(path: Path, content: str) -> None:
    """Raises DataError if a file with other content exists, since it may still be needed."""
    if not os.path.exists(path):
        return
    try:
        is_same = read_named(path, LARGEST_TOKENIZER) == content.encode()
    except OSError:
        is_same = False
    if not is_same:
        raise DataError(f"{path} exists already", fix="another --out, or remove it first")


def refuse_existing(path: str | Path) -> None:
    """Raises DataError if a token file exists, since a run may be training on it."""
    for final in (*token_paths(path), loss_path(path)):
        if os.path.lexists(final):  # even a dangling link
            raise DataError(f"{final} exists already", fix="another --out, or remove it first")


def write_tokens(
    path: str | Path,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    end_of_text: int | None = None,
) -> Summary:
    """Encodes documents one by one into a token file.

    `progress(documents, tokens)` is called after each, with the totals so far. `end_of_text` is the
    id appended to each; None: nothing is.

    Raises DataError if the file exists or there are no tokens, StorageError if writing fails.
    """
    refuse_existing(path)
    dtype = DTYPES[storage_dtype(tokenizer.size)]
    with TokenWriter(path, tokenizer, end_of_text, with_loss=False) as writer:
        for document in documents:
            ids = tokenizer.encode(document, parse_special=False)
            if len(ids) and end_of_text is not None:
                ids = np.append(ids, end_of_text)
            lengths = np.array([len(ids)])
            size = np.array([len(document.encode(errors="surrogatepass"))])
            writer.write(Encoded(ids.astype(dtype), lengths, size, None))
            if progress:
                progress(writer.documents, writer.tokens)
        if not writer.tokens:
            raise DataError("the corpus is empty: no tokens to write")
        return writer.finish()
