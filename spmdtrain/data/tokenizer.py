"""Turn text into token ids and back: bytes, characters, or a Hugging Face `tokenizer.json`.

A tokenizer's *spec* is a JSON value from which it can be made again anywhere. It lies beside token
files and in a run's config, so that ids can be decoded after the tokenizer's own file has moved.

The *end of text* is the token that stands behind each document.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from spmdtrain.config.errors import DataError

UNDECODABLE = "\ufffd"
# Ids that no text has, so that they can end one. 0xFF is no byte of UTF-8, and U+10FFFF never a
# character; as the last code point it takes no other character's id.
END_BYTE = 0xFF
END_CHARACTER = "\U0010ffff"
# The names under which tokenizers have one, as Hugging Face's are published.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end|>")


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    size: int  # ids are < size

    def encode(self, text: str) -> np.ndarray:
        """Return the ids, int32 [tokens]. Raises DataError for a text that it has no ids for."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode(text)` for each text."""
        ...

    def id_of(self, token: str) -> int | None:
        """Return the id of a token that is written like this; None where there is none."""
        ...

    def decode(self, ids) -> str:
        """Return the text. Never fails: an id that means nothing becomes U+FFFD, or is left out."""
        ...

    def spec(self) -> dict:
        """Return the value from which `from_spec` makes it again."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8: 256 ids. Every text comes back as it was."""

    size = 256

    def encode(self, text: str) -> np.ndarray:
        try:
            # surrogateescape: a prompt from the command line that is not UTF-8 keeps its bytes.
            encoded = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text holds half a surrogate pair at position {error.start}"
            ) from None
        return np.frombuffer(encoded, np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

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


class CharacterTokenizer:
    """One id per character of an alphabet, in the order of code points."""

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.size = len(self.alphabet)
        self._points = _code_points(self.alphabet)

    def encode(self, text: str) -> np.ndarray:
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = self._points[np.minimum(ids, self.size - 1)] != points
        if unknown.any():
            at = int(unknown.argmax())
            raise DataError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among the "
                f"{self.size} characters of the tokenizer"
            )
        return ids.astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def id_of(self, token: str) -> int | None:
        found = self.alphabet.find(token) if len(token) == 1 else -1
        return None if found < 0 else found

    def decode(self, ids) -> str:
        ids = np.asarray(ids).tolist()
        return "".join(self.alphabet[i] if 0 <= i < self.size else UNDECODABLE for i in ids)

    def spec(self) -> dict:
        return {"kind": "characters", "characters": self.alphabet}


class HuggingFaceTokenizer:
    """A `tokenizer.json`, given as its content; `path` is for messages.

    It adds no special tokens, but finds those that the text spells out.
    """

    def __init__(self, content: str, path: str):
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise DataError(
                f"the tokenizer {path} needs the package `tokenizers`, which is not installed",
                fix="pip install tokenizers",
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the package raises nothing narrower
            raise DataError(f"{path} is not a Hugging Face tokenizer.json: {error}") from None
        # A file saved with truncation would cut every document at a few hundred tokens, silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.size = max(ids, default=-1) + 1
        self._content = content
        self._path = path

    def encode(self, text: str) -> np.ndarray:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The fast one tracks no offsets in the text, which nobody asks for.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens and their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def decode(self, ids) -> str:
        known = [i for i in np.asarray(ids).tolist() if 0 <= i < self.size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def spec(self) -> dict:
        return {
            "kind": "huggingface",
            "path": self._path,
            "sha256": hashlib.sha256(self._content.encode()).hexdigest(),
            "json": self._content,
        }


def open_tokenizer(name: str, texts: Iterable[str] | None = None) -> Tokenizer:
    """Open a tokenizer: `bytes`, `characters`, or the path of a `tokenizer.json`.

    `texts` are needed by `characters`, whose alphabet is what occurs in them. Raises DataError
    where there is no such tokenizer, or its file cannot be read.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "characters":
        assert texts is not None, "the characters tokenizer is made from a corpus"
        alphabet = set().union(*texts)
        if not alphabet:
            raise DataError("the corpus is empty: it has no characters to make a tokenizer of")
        return CharacterTokenizer(alphabet)
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"no tokenizer {name!r}: neither a known name nor a file",
            fix="bytes, characters or a tokenizer.json",
        )
    try:
        return HuggingFaceTokenizer(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise DataError(f"{name} is not a Hugging Face tokenizer.json: not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {name}: {error.strerror}") from None


def end_of_text(tokenizer: Tokenizer, asked: str, name: str) -> tuple[Tokenizer, int | None]:
    """Return the tokenizer with an end of text, and its id, which is None if `asked` is "none".

    `asked` may be a token of the tokenizer, or "auto". Then it is the byte 0xFF, the character
    U+10FFFF, which is added to the alphabet, or of a `tokenizer.json` the `eos_token` that
    `tokenizer_config.json` beside it names, or else the special token with a known name.

    `name` is that of the tokenizer, as `open_tokenizer` takes it. Raises DataError where there is
    no such token.
    """
    if asked == "none":
        return tokenizer, None
    if asked != "auto":
        found = tokenizer.id_of(asked)
        if found is None:
            raise DataError(f"the tokenizer {name} has no token {asked!r} to end a text with")
        return tokenizer, found
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer, END_BYTE
    if isinstance(tokenizer, CharacterTokenizer):
        extended = CharacterTokenizer(tokenizer.alphabet + END_CHARACTER)
        return extended, extended.id_of(END_CHARACTER)
    special = tokenizer.special_tokens() if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    for token in (_eos_token(Path(name).expanduser()), *END_NAMES):
        if token in special:
            return tokenizer, special[token]
    raise DataError(
        f"no token of {name} is known to end a text",
        found=", ".join(list(special)[:5]) or "no special tokens",
        fix="--end-of-text TOKEN, or --end-of-text none",
    )


def _eos_token(path: Path) -> str | None:
    """Return the end of text that `tokenizer_config.json` beside a `tokenizer.json` names."""
    try:
        content = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
        token = content.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def from_spec(spec: dict) -> Tokenizer:
    """Return the tokenizer that `spec()` described. Raises DataError where it is damaged."""
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
        }:
            if hashlib.sha256(content.encode()).hexdigest() != digest:
                raise DataError(
                    f"the stored copy of the tokenizer {path} does not have its recorded sha256"
                )
            return HuggingFaceTokenizer(content, path)
    raise DataError(f"not a tokenizer that this version knows: {json.dumps(spec)[:80]}")


def tokenizer_fingerprint(spec: dict | None) -> str:
    """Return a hex hash of what a tokenizer does, whatever path it was read from."""
    if spec and "json" in spec:
        return _fingerprint_of_json(spec.get("kind"), spec.get("sha256"), spec["json"])
    content = {key: value for key, value in (spec or {}).items() if key != "path"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=4)
def _fingerprint_of_json(kind: str | None, sha256: str | None, content: str) -> str:
    """Return it for a `tokenizer.json`, which has megabytes and is that of many files."""
    whole = {"kind": kind, "sha256": sha256, "json": content}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _code_points(text: str) -> np.ndarray:
    """Return [characters] uint32; half a surrogate pair passes."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
