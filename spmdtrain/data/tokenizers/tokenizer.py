"""Turns text into token ids and back: bytes, characters, or a Hugging Face `tokenizer.json`.

A tokenizer's *spec* is a JSON value from which it can be rebuilt anywhere. It is stored with token
files and in a run's config, so ids can be decoded after the tokenizer's own file has moved.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.data.tokenizers.offsets import Encoding

UNDECODABLE = "\ufffd"
# Ids that never occur in text, so they can end one. 0xFF is not a byte of UTF-8, and U+10FFFF is
# never a character; as the last code point it shifts no other character's id.
END_BYTE = 0xFF
END_CHARACTER = "\U0010ffff"


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    size: int  # ids are < size

    def encode(self, text: str, *, parse_special: bool = True) -> np.ndarray:
        """Returns the ids, int32 [tokens]. Raises DataError for text that has no ids.

        A special token spelled in the text is that token, or text if `parse_special` is False.
        """
        ...

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[np.ndarray]:
        """Returns `encode(text)` for each text."""
        ...

    def encode_parts(self, parts: list[str], *, parse_special: bool = False) -> Encoding:
        """Returns the tokens of the joined parts, encoded as one text, with their spans.

        Parts 1, 3, 5, ... are ours: special tokens spelled in them are tokens. The others are other
        people's text, in which they are tokens only with `parse_special`.
        """
        ...

    def spells_special(self, text: str) -> bool:
        """Returns True if a text spells out a special token."""
        ...

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the spans of a text, in characters, that would be special tokens."""
        ...

    def is_special(self, token: int) -> bool:
        """Returns True if an id is that of a special token."""
        ...

    def id_of(self, token: str) -> int | None:
        """Returns the id of the token with this text; None if there is none."""
        ...

    def decode(self, ids) -> str:
        """Returns the text. Never fails: an unknown id becomes U+FFFD or is left out."""
        ...

    def spec(self) -> dict:
        """Returns the value from which `from_spec` rebuilds the tokenizer."""
        ...


class _NoSpecialTokens:
    """The part of a tokenizer that special tokens would need: it has none."""

    def encode(self, text: str, *, parse_special: bool = True) -> np.ndarray:
        raise NotImplementedError

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        parse_special: bool = True,  # noqa: ARG002
    ) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def spells_special(self, text: str) -> bool:  # noqa: ARG002
        return False  # there are none

    def special_spans(self, text: str) -> list[tuple[int, int]]:  # noqa: ARG002
        return []

    def is_special(self, token: int) -> bool:  # noqa: ARG002
        return False


class ByteTokenizer(_NoSpecialTokens):
    """The bytes of UTF-8: 256 ids. Every text survives the round trip."""

    size = 256

    def encode(self, text: str, *, parse_special: bool = True) -> np.ndarray:  # noqa: ARG002
        try:
            # surrogateescape: a command-line prompt that is not UTF-8 keeps its bytes.
            encoded = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text holds half a surrogate pair at position {error.start}"
            ) from None
        return np.frombuffer(encoded, np.uint8).astype(np.int32)

    def encode_parts(self, parts: list[str], *, parse_special: bool = False) -> Encoding:  # noqa: ARG002
        text = "".join(parts)
        points = _code_points(text)
        sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
        places = np.repeat(np.arange(len(text)), sizes)
        return Encoding(self.encode(text), places, places + 1)

    def id_of(self, token: str) -> int | None:
        encoded = token.encode("utf-8", errors="surrogateescape")
        return encoded[0] if len(encoded) == 1 else None

    def decode(self, ids) -> str:
        ids = np.asarray(ids, np.int64)
        # 0xFF never occurs in UTF-8: ids beyond the tokenizer (of a padded vocabulary) decode as
        # U+FFFD.
        known = np.where((ids < 0) | (ids > 255), 0xFF, ids)
        return known.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def spec(self) -> dict:
        return {"kind": "bytes"}


class CharacterTokenizer(_NoSpecialTokens):
    """One id per character of an alphabet, in the order of code points."""

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.size = len(self.alphabet)
        self._points = _code_points(self.alphabet)

    def encode(self, text: str, *, parse_special: bool = True) -> np.ndarray:  # noqa: ARG002
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = self._points[np.minimum(ids, self.size - 1)] != points
        if unknown.any():
            at = int(unknown.argmax())
            raise DataError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among the "
                f"{self.size} characters of the tokenizer",
                fix="a text without it, or training with the tokenizer `bytes`",
            )
        return ids.astype(np.int32)

    def encode_parts(self, parts: list[str], *, parse_special: bool = False) -> Encoding:  # noqa: ARG002
        text = "".join(parts)
        places = np.arange(len(text))
        return Encoding(self.encode(text), places, places + 1)

    def id_of(self, token: str) -> int | None:
        place = self.alphabet.find(token) if len(token) == 1 else -1
        return None if place < 0 else place

    def decode(self, ids) -> str:
        ids = np.asarray(ids).tolist()
        return "".join(self.alphabet[i] if 0 <= i < self.size else UNDECODABLE for i in ids)

    def spec(self) -> dict:
        return {"kind": "characters", "characters": self.alphabet}


def has_file(name: str) -> bool:
    """Returns True if a tokenizer of this name, as for `open_tokenizer`, comes from a file."""
    return name not in ("bytes", "characters")


def open_tokenizer(name: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """Opens a tokenizer: `bytes`, `characters`, or the path of a `tokenizer.json` or its folder.

    `characters` needs `texts`: its alphabet is the characters that occur in them. Raises DataError
    if there is no such tokenizer, or if its file cannot be read.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "characters":
        assert texts is not None, "the characters tokenizer is made from a corpus"
        alphabet = set().union(*texts)
        if not alphabet:
            raise DataError("the corpus is empty: it has no characters to make a tokenizer of")
        return CharacterTokenizer(alphabet)
    from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
    from spmdtrain.data.tokenizers.other_libraries import refuse_other_library
    from spmdtrain.data.tokenizers.tokenizer_folder import specials_named, tokenizer_file

    path = tokenizer_file(name)
    try:
        refuse_other_library(path)
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        what = f"{name} is not a Hugging Face tokenizer.json: not UTF-8 text"
        raise DataError(what, fix=AGAIN) from None
    except OSError as error:
        what = f"cannot read the tokenizer {name}: {error.strerror}"
        raise DataError(what, fix="a file that you may read") from None
    return HuggingFaceTokenizer(content, str(name), specials_named(path.parent))


def from_spec(spec: dict) -> Tokenizer:
    """Returns the tokenizer that `spec()` described. Raises DataError if it is damaged."""
    match spec:
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "characters", "characters": str(alphabet)} if alphabet:
            return CharacterTokenizer(alphabet)
        case {
            "kind": "huggingface",
            "path": str(path),
            "sha256": str(digest),
            "json": str(content),
            **others,
        }:
            if hashlib.sha256(content.encode()).hexdigest() != digest:
                raise DataError(
                    f"the stored copy of the tokenizer {path} does not have its recorded sha256",
                    fix="a copy of the run or of the token file from before",
                )
            control = others.get("control", [])
            if isinstance(control, list) and all(isinstance(token, str) for token in control):
                from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

                return HuggingFaceTokenizer(content, path, control)
    what = f"not a tokenizer that this version knows: {json.dumps(spec)[:80]}"
    raise DataError(what, fix="a newer version of spmdtrain")


def tokenizer_fingerprint(spec: dict | None) -> str:
    """Returns a hex hash of a tokenizer's behaviour, independent of its path."""
    if spec and "json" in spec:
        return _fingerprint_of_json(spec.get("kind"), spec.get("sha256"), spec["json"])
    content = {key: value for key, value in (spec or {}).items() if key not in ("path", "control")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=4)
def _fingerprint_of_json(kind: str | None, sha256: str | None, content: str) -> str:
    """Returns the hash for a `tokenizer.json`, which is megabytes and shared by many files."""
    whole = {"kind": kind, "sha256": sha256, "json": content}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _code_points(text: str) -> np.ndarray:
    """Returns uint32 [characters]; a lone surrogate is allowed."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
