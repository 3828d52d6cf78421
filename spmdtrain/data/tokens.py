"""Token files and how to read them: `NAME.bin`, `NAME.idx` and the sidecar `NAME.json`.

    NAME.bin   token ids, document after document, little endian: uint16 if the vocabulary fits,
               else uint32
    NAME.idx   the offset in tokens of each document's first token, little endian int64, strictly
               increasing
    NAME.json  version, dtype, counts, vocabulary, tokenizer spec, the id that ends a document or
               null, bytes of UTF-8 that the tokens stand for, sha256 of the other files
    NAME.loss  of conversations alone: a byte for each token, 1 where it counts in the loss, else 0

The files of one prepare share the content of a `tokenizer.json`, which may have ten megabytes: it
lies in a file beside them, whose name stands in the spec as "file".

Offsets are in a raw file, not in the sidecar or in a .npy: tens of millions of documents do not fit
in readable JSON, their number is not known before they are written, and a raw file can be appended
to and mapped. Empty documents are left out. The sidecar is put in place last, and without it files
are not a token file.
"""

import hashlib
import json
import mmap
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.tokenizer import tokenizer_fingerprint

VERSION = 1
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
    """Return the key of DTYPES in which ids of this vocabulary are stored."""
    return "uint16" if vocab <= 65536 else "uint32"


def token_paths(path: str | Path) -> tuple[Path, Path, Path]:
    """Return the .bin, .idx and .json of a token file, named with or without its `.bin`."""
    stem = str(Path(path).expanduser()).removesuffix(".bin")
    return Path(stem + ".bin"), Path(stem + ".idx"), Path(stem + ".json")


def loss_path(path: str | Path) -> Path:
    """Return the .loss of a token file, which only conversations have."""
    return token_paths(path)[0].with_suffix(".loss")


def map_file(path: str | Path) -> mmap.mmap:
    """Map a file to be read."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class MappedTokens:
    """The content of a token file, mapped when it is first read; it has a `path` and a `dtype`."""

    path: str
    dtype: Any

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The .bin, mapped."""
        return map_file(self.path)

    @cached_property
    def tokens(self) -> np.ndarray:
        """The ids [tokens], mapped from the file."""
        return np.frombuffer(self.mapping, self.dtype)


@dataclass(frozen=True)
class TokenSource(MappedTokens):
    """A token file whose sizes fit its sidecar. Its content is read only when asked for."""

    path: str  # of the .bin, for messages
    sidecar: dict

    has_documents = True  # the .idx says where they start

    @property
    def vocab(self) -> int:
        return self.sidecar["vocab"]

    @property
    def tokenizer_spec(self) -> dict | None:
        """The spec of its tokenizer, for `from_spec`; None if its ids stand for no text."""
        return self.sidecar["tokenizer"]

    @property
    def end_of_text(self) -> int | None:
        """The id that ends each document; None where none does, or an older version wrote it."""
        return self.sidecar.get("end_of_text")

    @property
    def fingerprint(self) -> str:
        """A hex hash of content and tokenizer, from the sidecar alone."""
        parts = [str(self.sidecar[key]) for key in ("dtype", "vocab", "sha256", "index_sha256")]
        if self.has_loss:
            parts.append(self.sidecar["loss_sha256"])
        parts.append(tokenizer_fingerprint(self.tokenizer_spec))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.sidecar["dtype"]]

    @cached_property
    def loss(self) -> np.ndarray:
        """Marks the tokens that count in the loss, uint8 [tokens], mapped; all 1 without .loss."""
        if not self.has_loss:
            return np.broadcast_to(np.uint8(1), self.sidecar["tokens"])
        return np.asarray(np.memmap(loss_path(self.path), np.uint8, mode="r"))

    @property
    def has_loss(self) -> bool:
        """True if a .loss file says which tokens count in the loss."""
        return "loss_sha256" in self.sidecar

    @property
    def unmapped(self) -> "Unmapped":
        """The same as `tokens`, but with no file held open between two slices."""
        return Unmapped(self.path, self.dtype, self.sidecar["tokens"])

    @property
    def unmapped_loss(self) -> "np.ndarray | Unmapped":
        """The same as `loss`, but with no file held open between two slices."""
        if not self.has_loss:
            return self.loss
        return Unmapped(str(loss_path(self.path)), np.dtype(np.uint8), self.sidecar["tokens"])

    @property
    def document_starts(self) -> np.ndarray:
        """The offsets of documents, int64, strictly increasing, the first 0.

        Raises DataError where they are not.
        """
        path = token_paths(self.path)[1]
        starts = np.fromfile(path, "<i8")
        inside = starts[0] == 0 and starts[-1] < self.sidecar["tokens"]
        if not inside or (starts[1:] <= starts[:-1]).any():
            raise DataError(
                f"{path} is damaged: "
                "its document offsets do not rise from 0 to the end of the tokens"
            )
        return starts


@dataclass(frozen=True)
class Unmapped:
    """The tokens of a file, which is opened for each slice. It supports len(), and step 1."""

    path: str
    dtype: np.dtype
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(self.size)
        assert step == 1
        wanted = max(stop - start, 0) * self.dtype.itemsize
        try:
            file = os.open(self.path, os.O_RDONLY)  # half the time of a file object
            try:
                content = os.pread(file, wanted, start * self.dtype.itemsize)
            finally:
                os.close(file)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        if len(content) < wanted:
            asked = f"{self.size} tokens"
            raise DataError(f"{self.path} was cut short while it was in use", asked=asked)
        return np.frombuffer(content, self.dtype)


def open_tokens(path: str | Path) -> TokenSource:
    """Open a token file, after checking that its three files belong together.

    Raises DataError where one is missing, or has another size than the sidecar says.
    """
    bin_path, idx_path, json_path = token_paths(path)
    if not bin_path.is_file():
        raise DataError(f"no token file {bin_path}", fix="spmdtrain data prepare")
    if not json_path.is_file():
        raise DataError(
            f"the token file {bin_path} has no sidecar {json_path}", fix="spmdtrain data prepare"
        )
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
        sidecar = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(f"the sidecar {path} is not JSON: {error}") from None
    if not isinstance(sidecar, dict) or "version" not in sidecar:
        raise DataError(f"{path} is not the sidecar of a token file: it has no version")
    if sidecar["version"] != VERSION:
        found = f"{path} has version {sidecar['version']!r}"
        raise DataError(f"{found}; this program reads version {VERSION}")
    for key, kind in SIDECAR_TYPES.items():
        if type(sidecar.get(key)) is not kind:
            raise DataError(f"the sidecar {path} is damaged: {key}={sidecar.get(key)!r}")
    if sidecar["dtype"] not in DTYPES:
        raise DataError(f"{path}: dtype={sidecar['dtype']!r}; it can be {' or '.join(DTYPES)}")
    if min(sidecar["tokens"], sidecar["documents"], sidecar["vocab"]) < 1:
        raise DataError(
            f"the sidecar {path} is damaged: tokens, documents and vocab are at least 1"
        )
    end = sidecar.get("end_of_text")
    if end is not None and not (type(end) is int and 0 <= end < sidecar["vocab"]):
        raise DataError(f"the sidecar {path} is damaged: end_of_text={end!r}")
    if "tokenizer" not in sidecar:
        raise DataError(f"the sidecar {path} is damaged: it says nothing of a tokenizer")
    spec = sidecar["tokenizer"]
    if not isinstance(spec, dict | None):
        raise DataError(f"the sidecar {path} is damaged: tokenizer={spec!r}")
    if spec and isinstance(spec.get("file"), str):
        sidecar["tokenizer"] = _with_content(spec, path)
    return sidecar


def _with_content(spec: dict, sidecar: Path) -> dict:
    """Return the spec of a tokenizer with the content of the file that it names."""
    file = sidecar.with_name(spec["file"])
    try:
        content = _read_shared(file)
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{file} cannot be read, the tokenizer of {sidecar}") from None
    return {name: value for name, value in spec.items() if name != "file"} | {"json": content}


@lru_cache(maxsize=4)
def _read_shared(file: Path) -> str:
    """Return the text of a file that many sidecars name; from_spec checks its sha256."""
    return file.read_text(encoding="utf-8")
