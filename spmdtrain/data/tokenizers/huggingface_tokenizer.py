"""Wraps a `tokenizer.json` of Hugging Face's library `tokenizers`.

A *control token* does not stand for text: it ends a document or opens a message. Control tokens are
those the file marks as special, added tokens of the form <|...|>, and those named by the caller,
e.g. the end of text in a `tokenizer_config.json`.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import AGAIN
from spmdtrain.data.tokenizers.offsets import Encoding, marks
from spmdtrain.data.tokenizers.windows import LONGEST, encode_in_windows, grouped

# Added tokens of this form are control tokens, however they are marked. The bars are ASCII or the
# fullwidth ones of DeepSeek.
CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
# Settings that let a model cut a text at random: subword regularisation of BPE, and of unigrams.
RANDOM = ("dropout", "alpha", "nbest_size")
QUOTED = 200  # characters of a package's error in a message


class HuggingFaceTokenizer:
    """A `tokenizer.json`, given as its content; `path` is for messages.

    It adds no special tokens when encoding. `control` names further control tokens; names without
    an id are ignored.
    """

    def __init__(self, content: str, path: str, control: Iterable[str] = ()):
        self._content = content
        self._path = path
        self._tokenizer = self._load()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        marked = {
            token.content: i
            for i, token in added.items()
            if token.special or CONTROL.fullmatch(token.content)
        }
        # A single character is in many texts and cannot be kept from the model.
        more = {token for token in control if token not in marked and len(token) > 1}
        named = {token: i for token in more if (i := self.id_of(token)) is not None}
        self._named = sorted(named)
        self.control: dict[str, int] = marked | named
        _refuse_shared_ids(vocabulary, self.control, path)
        self._flags = {token.content: token for token in added.values()}
        _mark(self._tokenizer, self.control, self._flags)
        _keep_apart(self._tokenizer, self.control)
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str, *, parse_special: bool = True) -> np.ndarray:
        return self.encode_batch([text], parse_special=parse_special)[0]

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[np.ndarray]:
        tokenizer = self._parsing if parse_special else self._tokenizer
        rows: list[np.ndarray] = []
        with self._refusing("cannot encode a text"):
            # The package needs over a hundred bytes for each byte of text.
            for group in grouped(texts, LONGEST):
                if len(group[0]) > LONGEST:
                    rows.append(encode_in_windows(group[0], self._encode_window(tokenizer)))
                    continue
                # The fast call does not track offsets.
                encodings = tokenizer.encode_batch_fast(group, add_special_tokens=False)
                rows += [self._checked(encoding.ids) for encoding in encodings]
        return rows

    def _encode_window(self, tokenizer: Any) -> Callable[[str], Encoding]:
        return lambda text: self._with_offsets(tokenizer, text)

    def encode_parts(self, parts: list[str], *, parse_special: bool = False) -> Encoding:
        text = "".join(parts)
        encoding = self._with_offsets(self._parsing, text)
        if parse_special:
            return encoding
        # Encoding the whole text is right, unless a part of others' text became a control token.
        others = marks(parts, [number % 2 == 1 for number in range(len(parts))])
        is_control = np.isin(encoding.ids, list(self.control.values()))
        if not encoding.touches(others)[is_control].any():
            return encoding
        return self._encode_apart(parts)

    def spells_special(self, text: str) -> bool:
        return self._spelled is not None and self._spelled.search(text) is not None

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        if self._spelled is None:
            return []
        spans = [match.span() for match in self._spelled.finditer(text)]
        if not self._normalizes:
            return spans
        # Text that is no token as spelled may become one once it is normalized, e.g. <|IM_END|>.
        encoding = self._with_offsets(self._parsing, text)
        is_control = np.isin(encoding.ids, list(self.control.values()))
        for start, end in zip(encoding.starts[is_control], encoding.ends[is_control], strict=True):
            if all(end <= first or last <= start for first, last in spans):
                spans.append((int(start), int(end)))
        return sorted(spans)

    def is_special(self, token: int) -> bool:
        return token in self.control.values()

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_of(self, i: int) -> str | None:
        """Returns the token with an id; None if there is none."""
        return self._tokenizer.id_to_token(i) if 0 <= i < self.size else None

    def begin_of_text(self) -> list[int]:
        """Returns the ids that the file's post-processor puts before a text."""
        import tokenizers

        with self._refusing("cannot process a text"):
            processor = tokenizers.Tokenizer.from_str(self._content).post_processor
            if processor is None:
                return []
            # A processor does not depend on the vocabulary. This one surely encodes its one word.
            model = tokenizers.models.WordLevel({"x": 0}, "x")
            text = tokenizers.Tokenizer(model).encode("x", add_special_tokens=False)
            processed = processor.process(text)
        return processed.ids[: processed.special_tokens_mask.index(0)]

    def with_control(self, tokens: Iterable[str]) -> "HuggingFaceTokenizer":
        """Returns the tokenizer with further control tokens."""
        more = [token for token in tokens if token not in self.control]
        if not more:
            return self
        return HuggingFaceTokenizer(self._content, self._path, [*self._named, *more])

    def added_in(self, text: str) -> list[str]:
        """Returns the added tokens in a text, except those that are only white space."""
        return [token for token in self._flags if token.strip() and token in text]

    def decode(self, ids) -> str:
        known = [i for i in np.asarray(ids).tolist() if 0 <= i < self.size]
        with self._refusing("cannot decode ids"):
            return self._tokenizer.decode(known, skip_special_tokens=False)

    def spec(self) -> dict:
        spec: dict[str, Any] = {
            "kind": "huggingface",
            "path": self._path,
            "sha256": hashlib.sha256(self._content.encode()).hexdigest(),
            "json": self._content,
        }
        return spec | ({"control": self._named} if self._named else {})

    @cached_property
    def _parsing(self):
        """The tokenizer that recognises control tokens spelled in a text."""
        tokenizer = self._load()
        _mark(tokenizer, self.control, self._flags)
        return tokenizer

    @cached_property
    def _stand_ins(self) -> tuple[Any, dict[str, str]]:
        """A tokenizer that treats control tokens as text, but recognises stand-ins for them.

        The second value is the text of each control token's stand-in, which cannot be guessed.
        """
        import tokenizers

        tokenizer = self._load()
        _mark(tokenizer, self.control, self._flags)
        _keep_apart(tokenizer, self.control)
        tokenizer.encode_special_tokens = True
        stand_ins = {token: f"x{secrets.token_hex(16)}x" for token in self.control}
        for token, stand_in in stand_ins.items():
            flags = _flags_of(self._flags.get(token))
            added = tokenizers.AddedToken(stand_in, special=False, **flags)
            tokenizer.add_tokens([added])
        return tokenizer, stand_ins

    @cached_property
    def _normalizes(self) -> bool:
        """True if a text may spell a control token differently from the file."""
        flags = (self._flags.get(token) for token in self.control)
        is_any = any(token is not None and token.normalized for token in flags)
        return is_any and self._tokenizer.normalizer is not None

    @cached_property
    def _spelled(self) -> re.Pattern | None:
        return _any_of(self.control)

    def _encode_apart(self, parts: list[str]) -> Encoding:
        """Encodes as `encode_parts` does when a part of others' text spells a control token."""
        tokenizer, stand_ins = self._stand_ins
        pattern = _any_of(stand_ins)
        assert pattern is not None, "a control token was found"
        written = []
        origin = []  # the place in the text of each written character
        place = 0
        for number, part in enumerate(parts):
            spelled = pattern.finditer(part) if number % 2 == 0 else ()
            done = 0
            for match in spelled:
                stand_in = stand_ins[match.group()]
                written += [part[done : match.start()], stand_in]
                origin.append(np.arange(place + done, place + match.start()))
                origin.append(np.full(len(stand_in), place + match.start()))
                done = match.end()
            written.append(part[done:])
            origin.append(np.arange(place + done, place + len(part)))
            place += len(part)
        origin = np.concatenate([*origin, [place]])
        with self._refusing("cannot encode a text"):
            encoded = tokenizer.encode("".join(written), add_special_tokens=False)
            number_of = {stand_ins[token]: number for token, number in self.control.items()}
            ids = list(encoded.ids)
            for place, token in enumerate(encoded.tokens):
                if token in number_of:
                    ids[place] = number_of[token]
            starts, ends = _spans(encoded)
        return Encoding(self._checked(ids), origin[starts], origin[ends])

    def _with_offsets(self, tokenizer: Any, text: str) -> Encoding:
        with self._refusing("cannot encode a text"):
            encoded = tokenizer.encode(text, add_special_tokens=False)
            return Encoding(self._checked(encoded.ids), *_spans(encoded))

    def _load(self):
        """Returns the package's tokenizer, without truncation, padding, trimming or chance."""
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise DataError(
                f"the tokenizer {self._path} needs the package `tokenizers`, "
                "which is not installed",
                fix="pip install tokenizers",
            ) from None
        _refuse_aborting(self._content, self._path)
        with self._refusing("is not a Hugging Face tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_str(self._content)
            # A file saved with truncation would cut every document after a few hundred tokens.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            # Trimming would exclude a token's leading space from its span.
            tokenizer.post_processor = None
            for name in RANDOM:  # a sample depends on nothing but the seed and the files
                if getattr(tokenizer.model, name, None) is not None:
                    setattr(tokenizer.model, name, None)
        return tokenizer

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        if ids and max(ids) >= self.size:
            raise DataError(
                f"the tokenizer {self._path} is damaged: its model gives an id that it does "
                "not list",
                found=f"{max(ids)} of {self.size}",
                fix=AGAIN,
            )
        return np.array(ids, np.int32)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turns errors of the package into a DataError. Its panics are not an `Exception`."""
        try:
            yield
        except DataError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            what = f"{self._path} {what}: {str(error)[:QUOTED]}"
            raise DataError(what, fix=f"{AGAIN}, or another tokenizer") from None


def _refuse_aborting(content: str, path: str) -> None:
    """Raises DataError for a file that would abort the process, which cannot be caught.

    The package strips the subword prefix from the second half of each merge, by bytes, and aborts
    if that leaves half a character (tokenizers 0.23).
    """
    if not PREFIX.search(content):
        return
    try:
        model = json.loads(content)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges", [])
        halves = [merge.split(" ")[-1] if isinstance(merge, str) else merge[1] for merge in merges]
        is_sound = all(half.startswith(prefix) for half in halves)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return  # the package refuses what is not a tokenizer
    if not is_sound:
        raise DataError(
            f"{path} is not a Hugging Face tokenizer.json: a merge lacks the prefix {prefix!r:.40}",
            fix=AGAIN,
        )


def _refuse_shared_ids(vocabulary: dict[str, int], control: dict[str, int], path: str) -> None:
    """Raises DataError if a control token shares its id with another token.

    The package numbers added tokens by the count of the vocabulary, whatever number the file has:
    where a piece of the vocabulary is lost, a text can produce the end of a text.
    """
    token_of = {i: token for token, i in control.items()}
    for token, i in vocabulary.items():
        if token_of.get(i, token) != token:
            raise DataError(
                f"the tokenizer {path} is damaged: two of its tokens have the same id",
                found=f"{token_of[i]!r:.60} and {token!r:.60}, both {i}",
                fix="the tokenizer.json as it was published",
            )


def _mark(tokenizer: Any, control: Iterable[str], flags: dict[str, Any]) -> None:
    """Marks control tokens as special, each with the file's flags for matching."""
    import tokenizers

    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, **_flags_of(flags.get(token)))
            for token in control
        ]
    )


def _flags_of(token: Any) -> dict[str, bool]:
    """Returns how an added token is matched; None: it is in the vocabulary."""
    if token is None:
        return {"normalized": False}
    return {
        name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")
    }


def _keep_apart(tokenizer: Any, control: Iterable[str]) -> None:
    """Keeps the model itself from turning text that spells a control token into it.

    A whole-word model, or one that prefers long pieces, may have the token in its vocabulary. So
    the text is cut after its first character, which becomes a separate word.
    """
    from tokenizers import Regex, pre_tokenizers

    in_model = [
        token
        for token in control
        if len(token) > 1 and tokenizer.model.token_to_id(token) is not None
    ]
    if not in_model:
        return
    pattern = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in in_model)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    before = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = split if before is None else pre_tokenizers.Sequence([before, split])


def _any_of(texts: Iterable[str]) -> re.Pattern | None:
    """Returns the pattern that finds any of the texts, preferring the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _spans(encoded: Any) -> tuple[np.ndarray, np.ndarray]:
    spans = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    return spans[:, 0], spans[:, 1]
