"""Token files and their readers: `NAME.bin`, `NAME.idx` and the sidecar `NAME.json`.

    NAME.bin   token ids, document after document, little endian: uint16 if the vocabulary fits,
               else uint32
    NAME.idx   the offset in tokens of each document's first token, little endian int64, strictly
               increasing
    NAME.json  version, dtype, counts, vocabulary, tokenizer spec, the id that ends a document or
               null, bytes of UTF-8 that the tokens stand for, sha256 of the other files
    NAME.loss  for conversations only: a byte per token, 1 if it counts in the loss, else 0; of a
               pair of conversations, which is one document, SECOND is added in the second
    NAME.ref   for pairs only, and only after `data reference`: see references.py

The files of one prepare share the content of a `tokenizer.json`, which may be ten megabytes: it is
in a file next to them, which the spec names as "file".

Offsets are in a raw file, not in the sidecar or a .npy: tens of millions of documents do not fit in
readable JSON, their number is unknown until they are written, and a raw file can be appended to and
mapped. Empty documents are left out. The sidecar is put in place last; without it there is no token
file.
"""

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.token_files.blocks import hash_of_blocks
from spmdtrain.data.token_files.rows import StoredRow, reading, require_file
from spmdtrain.data.tokenizers.tokenizer import tokenizer_fingerprint

VERSION = 1
COUNTS, SECOND = 1, 2  # bits of a mark in a .loss
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SIDECAR_TYPES = {
    "dtype": str,
    "tokens": int,
    "documents": int,
    "vocab": int,
    "sha256": str,
    "index_sha256": str,
}


def storage_dtype(vocab: int) -> str:
    """Returns the key in DTYPES of the type that stores ids of this vocabulary."""
    return "uint16" if vocab <= 65536 else "uint32"


def token_paths(path: str | Path) -> tuple[Path, Path, Path]:
    """Returns the .bin, .idx and .json of a token file, named with or without its `.bin`."""
    stem = os.path.expanduser(str(path)).removesuffix(".bin")
    return Path(stem + ".bin"), Path(stem + ".idx"), Path(stem + ".json")


def loss_path(path: str | Path) -> Path:
    """Returns the .loss path of a token file, which only conversations have."""
    return token_paths(path)[0].with_suffix(".loss")


def beyond_vocabulary(path: str, token: int, offset: int, vocab: int, fix: str = "") -> DataError:
    """Returns the error for an id at this offset, in tokens, in a file."""
    return DataError(
        f"{path}: id {token} at token offset {offset} is beyond its vocabulary of {vocab}", fix=fix
    )


@dataclass(frozen=True)
class TokenSource:
    """A token file whose sizes match its sidecar. Its content is read only on request."""

    path: str  # of the .bin, for messages
    sidecar: dict

    has_documents = True  # the .idx says where they start

    @property
    def vocab(self) -> int:
        return self.sidecar["vocab"]

    @property
    def tokenizer_spec(self) -> dict | None:
        """The spec of its tokenizer, for `from_spec`; None if its ids do not stand for text."""
        return self.sidecar["tokenizer"]

    @property
    def begin_of_text(self) -> int | None:
        """The id that begins each document; None if there is none, or in files of older
        versions.
        """
        return self.sidecar.get("begin_of_text")

    @property
    def end_of_text(self) -> int | None:
        """The id that ends each document; None if there is none, or in files of older versions."""
        return self.sidecar.get("end_of_text")

    @property
    def template(self) -> str | dict | None:
        """The spec of the template of its conversations; None if it holds none."""
        return self.sidecar.get("template")

    @cached_property
    def fingerprint(self) -> str:
        """A hex hash of the sidecar and of blocks of the files as they are now."""
        parts = [str(self.sidecar[key]) for key in ("dtype", "vocab", "sha256", "index_sha256")]
        if self.has_loss:
            parts.append(self.sidecar["loss_sha256"])
        parts.append(tokenizer_fingerprint(self.tokenizer_spec))
        for row in filter(None, (self.row, self.loss_row)):
            parts.append(hash_of_blocks(row.path, len(row) * row.dtype.itemsize))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.sidecar["dtype"]]

    @property
    def tokens(self) -> np.ndarray:
        """The ids [tokens], read in full."""
        return self.row[:]

    @property
    def loss(self) -> np.ndarray:
        """The marks of the tokens that count in the loss, uint8 [tokens], read in full."""
        row = self.loss_row
        return np.broadcast_to(np.uint8(1), self.sidecar["tokens"]) if row is None else row[:]

    @cached_property
    def row(self) -> StoredRow:
        """The ids [tokens], read a slice at a time."""
        return StoredRow(self.path, self.dtype, self.sidecar["tokens"])

    @cached_property
    def loss_row(self) -> StoredRow | None:
        """The same as `loss`, read a slice at a time; None: all count."""
        if not self.has_loss:
            return None
        path = str(loss_path(self.path))
        return StoredRow(path, np.dtype(np.uint8), self.sidecar["tokens"])

    @property
    def has_loss(self) -> bool:
        """True if a .loss file says which tokens count in the loss."""
        return "loss_sha256" in self.sidecar

    @property
    def has_pairs(self) -> bool:
        """True if each document is a pair of conversations, one preferred to the other."""
        return self.sidecar.get("pairs") is True

    @property
    def document_starts(self) -> np.ndarray:
        """The offsets of documents, int64, strictly increasing, the first 0.

        Raises DataError if they are not, or do not match the hash in the sidecar.
        """
        path = token_paths(self.path)[1]
        with reading(path):
            starts = np.fromfile(path, "<i8")
        inside = len(starts) > 0 and starts[0] == 0 and starts[-1] < self.sidecar["tokens"]
        if not inside or (starts[1:] <= starts[:-1]).any():
            raise DataError(
                f"{path} is damaged: "
                "its document offsets do not rise from 0 to the end of the tokens"
            )
        if hashlib.sha256(starts.data).hexdigest() != self.sidecar["index_sha256"]:
            raise DataError(f"{path} is damaged: its sha256 is not the one in its sidecar")
        return starts


def open_tokens(path: str | Path) -> TokenSource:
    """Opens a token file, after checking that its three files belong together.

    Raises DataError if one is missing, or its size differs from the sidecar's.
    """
    bin_path, idx_path, json_path = token_paths(path)
    for file in (bin_path, idx_path, json_path, loss_path(path)):
        require_file(file)
    prepare = f"spmdtrain data prepare FILE --out {shlex.quote(str(bin_path).removesuffix('.bin'))}"
    if not bin_path.is_file():
        raise DataError(f"no token file {bin_path}", fix=prepare)
    if not json_path.is_file():
        raise DataError(f"the token file {bin_path} has no sidecar {json_path}", fix=prepare)
    sidecar = _read_sidecar(json_path)
    expectations = [
        (bin_path, sidecar["tokens"], DTYPES[sidecar["dtype"]].itemsize),
        (idx_path, sidecar["documents"], 8),
    ]
    if "loss_sha256" in sidecar:
        expectations.append((loss_path(bin_path), sidecar["tokens"], 1))
    for file, count, itemsize in expectations:
        if not file.is_file():
            raise DataError(f"{file} is missing, which belongs to {bin_path}")
        size = file.stat().st_size
        expected = count * itemsize
        if size != expected:
            wrong = "truncated" if size < expected else "too long"
            raise DataError(
                f"{file} is {wrong}",
                asked=f"{expected} bytes ({json_path})",
                found=f"{size} bytes",
            )
    return TokenSource(str(bin_path), sidecar)


def _read_sidecar(path: Path) -> dict:
    try:
        with reading(path):
            sidecar = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise DataError(f"the sidecar {path} is not one: its JSON is nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        if isinstance(error, DataError):
            raise
        raise DataError(f"the sidecar {path} is not JSON: {error}") from None
    if not isinstance(sidecar, dict) or "version" not in sidecar:
        raise DataError(f"{path} is not the sidecar of a token file: it has no version")
    if sidecar["version"] != VERSION:
        version = f"{path} has version {sidecar['version']!r}"
        raise DataError(f"{version}; this program reads version {VERSION}")
    for key, kind in SIDECAR_TYPES.items():
        if type(sidecar.get(key)) is not kind:
            raise DataError(f"the sidecar {path} is damaged: {key}={sidecar.get(key)!r}")
    if sidecar["dtype"] not in DTYPES:
        raise DataError(f"{path}: dtype={sidecar['dtype']!r}; it can be {' or '.join(DTYPES)}")
    counts = (sidecar["tokens"], sidecar["documents"], sidecar["vocab"])
    if min(counts) < 1 or max(counts) >= 2**63:
        raise DataError(
            f"the sidecar {path} is damaged: tokens, documents and vocab are from 1 to 2**63 - 1"
        )
    for key in ("begin_of_text", "end_of_text"):
        token = sidecar.get(key)
        if token is not None and not (type(token) is int and 0 <= token < sidecar["vocab"]):
            raise DataError(f"the sidecar {path} is damaged: {key}={token!r}")
    if not isinstance(sidecar.get("template"), str | dict | None):
        raise DataError(f"the sidecar {path} is damaged: template={sidecar['template']!r:.60}")
    if "tokenizer" not in sidecar:
        raise DataError(f"the sidecar {path} is damaged: it names no tokenizer")
    spec = sidecar["tokenizer"]
    if not isinstance(spec, dict | None):
        raise DataError(f"the sidecar {path} is damaged: tokenizer={spec!r}")
    if spec and isinstance(spec.get("file"), str):
        sidecar["tokenizer"] = _with_content(spec, path)
    return sidecar


def _with_content(spec: dict, sidecar: Path) -> dict:
    """Returns the tokenizer spec, including the content of the file it names."""
    try:
        file = sidecar.with_name(spec["file"])
    except ValueError:  # a path, or nothing
        raise DataError(f"the sidecar {sidecar} is damaged: file={spec['file']!r:.80}") from None
    require_file(file)
    try:
        content = _read_shared(file)
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{file} cannot be read, the tokenizer of {sidecar}") from None
    return {name: value for name, value in spec.items() if name != "file"} | {"json": content}


@lru_cache(maxsize=4)
def _read_shared(file: Path) -> str:
    """Returns the text of a file named by many sidecars; from_spec checks its sha256."""
    return file.read_text(encoding="utf-8")
