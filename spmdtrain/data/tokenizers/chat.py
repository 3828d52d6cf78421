"""Turns conversations into tokens, with loss on the answers only.

A *conversation* is a list of messages, {"role": ..., "content": ...}. Each is written out by a
*template*, a text with the placeholders {role} and {content}. The text before {content} opens a
message; {content} and the text after it are what a model writes, and stops with.

A conversation is written out in full and encoded once, so its tokens are those of its text. A token
is learned if it holds a character of an answer, even if it begins in the opening.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from spmdtrain.data.tokenizers.offsets import marks
from spmdtrain.data.tokenizers.tokenizer import Tokenizer

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
ANSWERS = "assistant"  # the role whose messages are learned
ASKS = "user"  # the role of a prompt
ROLES = (ANSWERS, ASKS, "system")  # used to try out a template
PLACE = re.compile(r"\{(\w+)\}")
MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|</?[A-Za-z_]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class Template:
    """The text before and after each message of a conversation; both may hold {role}."""

    opening: str
    closing: str

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Returns the template that a text describes. Raises ConfigError on a bad placeholder."""
        opening, content, closing = text.partition("{content}")
        if not content or "{role}" not in opening or "{content}" in closing:
            raise ConfigError(
                f"the template {text!r} does not have {{role}} and then {{content}}, once",
                fix=repr(CHATML),
            )
        unknown = [place for place in PLACE.findall(text) if place not in ("role", "content")]
        if unknown or "{%" in text or "{{" in text:
            named = f"the place {{{unknown[0]}}}" if unknown else "code of Jinja"
            raise ConfigError(
                f"the template {text!r} has {named}; it can have {{role}} and {{content}}",
                fix=repr(CHATML),
            )
        return cls(opening, closing)

    @property
    def text(self) -> str:
        """The text that `parse` accepts."""
        return f"{self.opening}{{content}}{self.closing}"

    def opening_of(self, role: str) -> str:
        """Returns the text before the content of a message."""
        return self.opening.replace("{role}", role)

    def closing_of(self, role: str) -> str:
        """Returns the text after the content of a message."""
        return self.closing.replace("{role}", role)

    @property
    def markers(self) -> list[str]:
        """The parts that look like special tokens, with the usual roles."""
        found = []
        for role in ROLES:
            for text in (self.opening_of(role), self.closing_of(role)):
                found += [marker for marker in MARKER.findall(text) if marker != role]
        return list(dict.fromkeys(found))


def encode_conversation(
    messages: Any,
    template: Template,
    tokenizer: Tokenizer,
    where: str,
    *,
    parse_special: bool = False,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns (ids int32 [tokens], loss uint8 [tokens], bytes of text).

    `loss` is 1 for tokens of an answer whose `weight` is not 0. Special tokens spelled in a message
    are text, unless `parse_special`.

    `where` names the document. Raises DataError, with that name, if it is not a conversation.
    """
    frames = [""]  # the text before each content, and after the last
    contents = []
    pieces: list[tuple[str, bool]] = []  # (text, whether it is part of an answer), in order
    for role, content, is_learned in _checked(messages, where):
        _check_role(role, template, tokenizer, where)
        opening, closing = template.opening_of(role), template.closing_of(role)
        frames[-1] += opening
        frames.append(closing)
        contents.append(content)
        pieces += [(opening, False), (content + closing, is_learned)]
    encoding = tokenizer.encode_parts(_alternating(frames, contents), parse_special=parse_special)
    learned = encoding.touches(marks([text for text, _ in pieces], [is_in for _, is_in in pieces]))
    size = sum(len(text.encode()) for text, _ in pieces)
    return encoding.ids, learned.astype(np.uint8), size


def encode_prompt(
    messages: Any, template: Template, tokenizer: Tokenizer, where: str
) -> np.ndarray:
    """Returns the ids of a conversation and the opening of an answer to it, int32 [tokens].

    They equal those of the conversation in training, up to the answer. Raises DataError as
    `encode_conversation` does.
    """
    frames = [""]
    contents = []
    for role, content, _ in _checked(messages, where):
        _check_role(role, template, tokenizer, where)
        frames[-1] += template.opening_of(role)
        frames.append(template.closing_of(role))
        contents.append(content)
    frames[-1] += template.opening_of(ANSWERS)
    return tokenizer.encode_parts(_alternating(frames, contents)).ids


def with_markers(tokenizer: Tokenizer, template: Template) -> Tokenizer:
    """Returns the tokenizer with those of the template's markers that it has as special tokens."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    found = []
    for role in ROLES:
        for text in (template.opening_of(role), template.closing_of(role)):
            found += [token for token in tokenizer.added_in(text) if token not in role]
    return tokenizer.with_control(found)


def markers_of_text(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Returns the markers of a template that the tokenizer has no token for."""
    return [marker for marker in template.markers if _is_text(marker, tokenizer)]


def _is_text(marker: str, tokenizer: Tokenizer) -> bool:
    try:
        return len(tokenizer.encode(marker)) != 1
    except DataError:  # its alphabet lacks some of the characters
        return False


def faults(template: Template, tokenizer: Tokenizer) -> list[str]:
    """Returns warnings about how a tokenizer handles a template, one line each."""
    lines = []
    spelled = markers_of_text(template, tokenizer)
    if spelled:
        named = " and ".join(
            f"{marker} ({len(tokenizer.encode(marker))} tokens)" for marker in spelled
        )
        special = " ".join(f"--special '{marker}'" for marker in spelled)
        lines.append(
            f"to this tokenizer the template's {named} is text like any other, which a message "
            f"can spell too; spmdtrain tokenizer train ... {special} makes one that has them"
        )
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return lines  # its tokens never span two texts
    opening = template.opening_of(ANSWERS)
    for answer in ("yes", "The", "1"):
        encoding = tokenizer.encode_parts([opening, answer, template.closing_of(ANSWERS)])
        cut = (encoding.starts < len(opening)) & (encoding.ends > len(opening))
        if cut.any():
            token = tokenizer.decode(encoding.ids[cut][:1])
            lines.append(
                f"an answer begins within a token: {answer!r} behind {opening[-12:]!r} gives "
                f"{token!r}, which `sample` cannot meet; end the opening otherwise, with a line "
                "break say"
            )
            break
    return lines


def _alternating(frames: list[str], contents: list[str]) -> list[str]:
    """Returns the frames with a content after each but the last."""
    return [part for pair in zip(frames, [*contents, ""], strict=True) for part in pair][:-1]


# --- what a message may be ----------------------------------------------------------------------


def _checked(messages: Any, where: str) -> Iterator[tuple[str, str, bool]]:
    """Yields (role, content, is it learned?) of each message. Raises DataError on a bad one."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} is not a list of messages", found=f"{messages!r:.60}")
    for message in messages:
        if not isinstance(message, dict):
            raise DataError(
                f"{where} has a message without role and content", found=f"{message!r:.60}"
            )
        # Tables store a key that a message lacks as None.
        given = {key: value for key, value in message.items() if value not in (None, "", [], {})}
        unknown = [key for key in given if key not in ("role", "content", "weight")]
        if unknown:
            raise DataError(
                f"{where} has a message with {unknown[0]!r}, which no template writes",
                found=f"{message!r:.60}",
                fix="messages of role, content and weight alone",
            )
        role = message.get("role")
        content = _content(message.get("content"), where)
        if not isinstance(role, str) or not role or content is None:
            raise DataError(
                f"{where} has a message without role and content", found=f"{message!r:.60}"
            )
        for text in (role, content):
            _check_text(text, where)
        yield role, content, _is_learned(role, message.get("weight"), where)


def _content(content: Any, where: str) -> str | None:
    """Returns the text of a message, which may come in parts; None if there is none."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in (None, "text") or not isinstance(text, str):
            raise DataError(
                f"{where} has a message with a part that is no text", found=f"{part!r:.60}"
            )
        texts.append(text)
    return "".join(texts) if texts else None


def _is_learned(role: str, weight: Any, where: str) -> bool:
    """Returns whether a message is learned: an answer is, unless its weight is 0."""
    if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
        raise DataError(f"{where} has a message with a weight that is not 0 or 1: {weight!r:.40}")
    if weight and role != ANSWERS:
        raise DataError(
            f"{where} has a message of {role!r} with weight 1: answers of {ANSWERS!r} alone are "
            "learned"
        )
    return role == ANSWERS and weight != 0


def _check_role(role: str, template: Template, tokenizer: Tokenizer, where: str) -> None:
    """Raises DataError if a role could pass for a part of the template."""
    spells = tokenizer.spells_special(role) or any(each in role for each in template.markers)
    if spells or not role.isprintable():
        raise DataError(f"{where} has a message whose role is no name", found=f"{role!r:.60}")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has a message that is not a text: half a surrogate pair at position "
            f"{error.start}"
        ) from None
