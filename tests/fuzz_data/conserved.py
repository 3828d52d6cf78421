"""Compares token files with the documents that went into them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fuzz_data import tokenizer_files
from fuzz_data.case import Case
from fuzz_data.expected import Unreadable, ids_of
from fuzz_data.formats import Made
from fuzz_data.wrong import Wrong

ANSWERS = "assistant"
LONG = 50_000  # characters that a package takes its time for, where no space is among them


def compare_documents(case: Case, made: Made, expected: list | None, paths: list[Path]) -> None:
    """See that token files hold exactly the documents. Raises Wrong.

    `expected` is None where the input is not whole, and should have been refused.
    """
    if expected is None:
        raise Wrong(f"{case.format} that is not whole is taken", f"{case.damage} of {case.target}")
    bodies, losses = _bodies(paths)
    spec = _sidecar(paths[0])["tokenizer"]
    meant = _Meant(case, made, spec)
    documents = []
    for document in expected:
        text, learned = _rendered(case, document)
        if meant.has_tokens(text):
            documents.append((text, learned))
    if len(bodies) != len(documents):
        raise Wrong(
            "another number of documents", f"{len(bodies)} for {len(documents)} that went in"
        )
    for ids, loss, (text, learned) in zip(bodies, losses, documents, strict=True):
        meant.compare(ids, text)
        if learned is not None:
            meant.compare_loss(ids, loss, learned)


def _sidecar(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def _bodies(paths: list[Path]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the ids and the loss of each document, without what ends it."""
    bodies = []
    losses = []
    for path in paths:
        end = _sidecar(path)["end_of_text"]
        try:
            held = ids_of(path)
        except Unreadable as error:
            raise Wrong("prepare writes files that do not fit", str(error)) from None
        assert held.starts is not None
        bounds = [*held.starts.tolist(), len(held.ids)]
        for begin, stop in zip(bounds[:-1], bounds[1:], strict=True):
            ids, loss = held.ids[begin:stop], held.loss[begin:stop]
            if end is not None:
                if ids[-1] != end or (ids[:-1] == end).any() or len(ids) < 2:
                    raise Wrong("a document does not end with its end of text alone", str(ids[-9:]))
                if loss[-1] != loss[-2]:
                    raise Wrong("the end of a document is learned otherwise than what it ends")
                ids, loss = ids[:-1], loss[:-1]
            bodies.append(ids)
            losses.append(loss)
    return bodies, losses


def _rendered(case: Case, document: Any) -> tuple[str, list[bool] | None]:
    """Return the text of a document, and of a conversation which of its characters are learned."""
    if document is None:
        return "", [] if case.chat else None
    if not case.chat:
        if not isinstance(document, str):
            raise Wrong("a document that is not a text is taken", repr(document)[:200])
        return document, None
    opening, closing = case.template.split("{content}")
    text = ""
    learned: list[bool] = []
    try:
        for message in document:
            role, content = message["role"], _joined(message["content"])
            before = opening.replace("{role}", role)
            answer = content + closing.replace("{role}", role)
            text += before + answer
            learned += [False] * len(before) + [is_learned(message)] * len(answer)
            unknown = [key for key in message if key not in ("role", "content", "weight")]
            if unknown and message[unknown[0]]:
                raise Wrong("a message with an unknown key is taken", repr(message)[:500])
    except (TypeError, KeyError, AttributeError):
        raise Wrong("what is no conversation is taken", repr(document)[:500]) from None
    return text, learned


def _joined(content: Any) -> str:
    """Return the content of a message, which may be in parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if not isinstance(part, str) and part.get("type", "text") != "text":
            raise TypeError("a picture")
        texts.append(part if isinstance(part, str) else part["text"])
    return "".join(texts)


def is_learned(message: dict[str, Any]) -> bool:
    """Return whether a message of a conversation counts in the loss."""
    return message["role"] == ANSWERS and message.get("weight") != 0


class _Meant:
    """What the ids of a case's tokenizer stand for, without the framework's own tokenizers."""

    def __init__(self, case: Case, made: Made, spec: dict):
        self._case = case
        self._name = case.tokenizer
        self._alphabet = spec.get("characters", "")
        self._is_damaged = case.target == "tokenizer" and case.damage != "none"
        self._package = None
        self._specials: list[str] = []
        if made.tokenizer is not None:
            content = made.tokenizer.read_text(encoding="utf-8")
            try:
                self._package = tokenizer_files.opened(content)
            except BaseException as error:  # a panic of Rust too
                raise Wrong("a damaged tokenizer is taken", str(error)) from None
            added = self._package.get_added_tokens_decoder().values()
            self._specials = [token.content for token in added]

    def has_tokens(self, text: str) -> bool:
        """Return whether a document has any."""
        if self._package is None or not text or len(text) > LONG:
            return bool(text)
        return len(self._package.encode(text, add_special_tokens=False).ids) > 0

    def compare(self, ids: np.ndarray, text: str) -> None:
        """See that the ids of a document stand for its text."""
        if self._name == "bytes":
            found = bytes(ids.tolist()).decode("utf-8", "replace")
        elif self._name == "characters":
            found = "".join(self._alphabet[i] for i in ids.tolist())
        else:
            found = self._of_package(ids, text)
        if found != text:
            raise Wrong(
                f"a document comes back otherwise ({self._name})",
                f"{found[:300]!r} for {text[:300]!r}",
            )

    def _of_package(self, ids: np.ndarray, text: str) -> str:
        assert self._package is not None
        spelled = any(special in text for special in self._specials if special)
        if len(text) > LONG and self._name != "metaspace":
            return self._package.decode(ids.tolist(), skip_special_tokens=False)
        if not spelled or (self._case.chat and not self._spells_in_content(text)):
            own = self._package.encode(text, add_special_tokens=False).ids
            return text if own == ids.tolist() else self._package.decode(ids.tolist())
        if self._is_damaged or (self._case.chat and self._name == "metaspace"):
            return text  # nothing is known of it
        if self._name == "metaspace":
            if np.isin(ids, tokenizer_files.special_ids("metaspace")).any():
                raise Wrong("a text that spells a special token holds it", text[:300])
            plain = tokenizer_files.taking_text_for_text("metaspace")
            return text if plain.encode(text, add_special_tokens=False).ids == ids.tolist() else ""
        pieces = tokenizer_files.bytes_of_pieces()
        if not self._case.chat and (ids >= self._first_special()).any():
            raise Wrong("a text that spells a special token holds it", text[:300])
        return b"".join(pieces[i] for i in ids.tolist()).decode("utf-8", "replace")

    def _first_special(self) -> int:
        return len(tokenizer_files.bytes_of_pieces()) - len(tokenizer_files.BYTELEVEL_SPECIALS)

    def _spells_in_content(self, text: str) -> bool:
        """Return whether a conversation spells special tokens beside those of its template."""
        template = self._case.template
        messages = text.count("<|im_end|>\n")
        return (
            any(special in text for special in self._specials if special not in template)
            or text.count("<|im_start|>") != text.count("<|im_end|>")
            or text.count("<|im_end|>") != messages
            or "<|im_start|>" not in template
            or not self._opens_well(text)
        )

    def _opens_well(self, text: str) -> bool:
        parts = text.split("<|im_start|>")
        roles = ("system\n", "user\n", "assistant\n")
        return not parts[0] and all(
            part.startswith(roles)
            and part.endswith("<|im_end|>\n")
            and part.count("<|im_end|>") == 1
            for part in parts[1:]
        )

    def compare_loss(self, ids: np.ndarray, loss: np.ndarray, learned: list[bool]) -> None:
        """See that exactly the tokens of answers are learned; one on a border may be either."""
        if self._name == "metaspace" or self._is_damaged:
            return
        text_marks = np.array(learned, np.uint8)
        if self._name == "characters":
            wrong = loss != text_marks
        else:
            wrong = self._wrong_by_bytes(ids, loss, text_marks)
        if wrong.any():
            raise Wrong(
                f"another part of a conversation is learned ({self._name})",
                f"{loss[:60].tolist()} at {np.flatnonzero(wrong)[:9].tolist()}",
            )

    def _wrong_by_bytes(self, ids: np.ndarray, loss: np.ndarray, marks: np.ndarray) -> np.ndarray:
        meant = [bytes([byte]) for byte in range(256)]
        if self._name in ("bytelevel", "unmarked"):
            meant = tokenizer_files.bytes_of_pieces()
        pieces = [meant[i] for i in ids.tolist()]
        text = b"".join(pieces).decode("utf-8", "replace")
        sizes = [len(letter.encode()) for letter in text]
        by_byte = np.repeat(marks, sizes)
        stops = np.cumsum([len(piece) for piece in pieces])
        starts = stops - [len(piece) for piece in pieces]
        total = np.concatenate([[0], np.cumsum(by_byte)])
        inside = total[stops] - total[starts]
        whole = inside == stops - starts
        none = inside == 0
        return (whole & (loss == 0)) | (none & (loss != 0))
