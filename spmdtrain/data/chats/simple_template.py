"""Applies the simple template: every message is written as one text with {role} and {content}.

The text up to {content} opens a message; a model writes {content} and stops with the text after it.
"""

import re
from dataclasses import dataclass

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.chats.conversation import ANSWERS, ASKS, Conversation
from spmdtrain.data.chats.rendered import MARKER, Frame, Written, check_role
from spmdtrain.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from spmdtrain.data.tokenizers.offsets import marks
from spmdtrain.data.tokenizers.tokenizer import Tokenizer

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
ROLES = (ANSWERS, ASKS, "system")  # used to try out a template
PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class SimpleTemplate:
    """The text before and after each message of a conversation; both may hold {role}."""

    opening: str
    closing: str

    @classmethod
    def parse(cls, text: str) -> "SimpleTemplate":
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
    def spec(self) -> str:
        """The text that `parse` accepts."""
        return f"{self.opening}{{content}}{self.closing}"

    def jinja(self, begin: str = "") -> str:
        """Returns the same template in Jinja, as transformers reads it; `begin` precedes it all."""

        def literal(text: str) -> str:
            escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
            return f"'{escaped}'"

        def with_role(text: str, role: str) -> str:
            return f" + {role} + ".join(map(literal, text.split("{role}")))

        role = "message['role']"
        message = f"{with_role(self.opening, role)} + message['content']"
        return (
            f"{{{{- {literal(begin)} }}}}"
            "{%- for message in messages %}"
            f"{{{{- {message} + {with_role(self.closing, role)} }}}}"
            "{%- endfor %}"
            "{%- if add_generation_prompt %}"
            f"{{{{- {literal(self.opening_of(ANSWERS))} }}}}"
            "{%- endif %}"
        )

    @property
    def letters(self) -> str:
        """The characters that it may write."""
        return self.spec

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer, in addition to the closing text: none."""
        return ()

    def opening_of(self, role: str) -> str:
        """Returns the text before the content of a message."""
        return self.opening.replace("{role}", role)

    def closing_of(self, role: str) -> str:
        """Returns the text after the content of a message."""
        return self.closing.replace("{role}", role)

    @property
    def markers(self) -> list[str]:
        """The parts that look like special tokens, with the usual roles."""
        markers = []
        for role in ROLES:
            for text in (self.opening_of(role), self.closing_of(role)):
                markers += [marker for marker in MARKER.findall(text) if marker != role]
        return list(dict.fromkeys(markers))

    def write(self, conversation: Conversation, tokenizer: Tokenizer, where: str) -> Written:
        """Returns a conversation as text. Raises DataError if it cannot be written."""
        frames, contents = self._pieces(conversation, tokenizer, where)
        pieces: list[tuple[str, bool]] = [("", False)]  # (text, is it part of an answer?)
        learned = conversation.learned
        for message, is_learned in zip(conversation.messages, learned, strict=True):
            pieces.append((self.opening_of(message["role"]), False))
            pieces.append((message["content"] + self.closing_of(message["role"]), is_learned))
        marked = marks([text for text, _ in pieces], [is_in for _, is_in in pieces])
        endless = [at for at, learns in enumerate(learned) if learns and not self.closing]
        return Written(_alternating(frames, contents), marked, never_ending=tuple(endless))

    def ask(self, conversation: Conversation, tokenizer: Tokenizer, where: str) -> list[str]:
        """Returns the parts of a conversation up to the place where an answer to it begins."""
        frames, contents = self._pieces(conversation, tokenizer, where)
        frames[-1] += self.opening_of(ANSWERS)
        return _alternating(frames, contents)

    @property
    def frame(self) -> Frame:
        """The texts around an answer."""
        return Frame(self.opening_of(ANSWERS), "", self.closing_of(ANSWERS))

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _pieces(
        self, conversation: Conversation, tokenizer: Tokenizer, where: str
    ) -> tuple[list[str], list[str]]:
        """Returns the texts of the template, and the contents that go between them."""
        if conversation.tools or conversation.documents:
            named = "tools" if conversation.tools else "documents"
            raise DataError(
                f"{where} has {named}, which the simple template does not write",
                fix="--chat-template FILE, of Jinja",
            )
        frames = [""]  # the text up to each content, and after the last
        for message in conversation.messages:
            role = message["role"]
            unknown = [
                key
                for key, value in message.items()
                if key not in ("role", "content") and value not in ("", [], {})
            ]
            if unknown:
                raise DataError(
                    f"{where} has a message with {unknown[0]!r}, which the simple template does "
                    "not write",
                    found=f"{message!r:.60}",
                    fix="messages with only role, content and weight, or --chat-template FILE",
                )
            check_role(role, self.markers, tokenizer, where)
            frames[-1] += self.opening_of(role)
            frames.append(self.closing_of(role))
        return frames, [message["content"] for message in conversation.messages]


def _alternating(frames: list[str], contents: list[str]) -> list[str]:
    """Returns the frames, with a content after each but the last."""
    return [part for pair in zip(frames, [*contents, ""], strict=True) for part in pair][:-1]


def with_markers(tokenizer: Tokenizer, template: SimpleTemplate) -> Tokenizer:
    """Returns the tokenizer with the template's markers as control tokens, where it has them."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    control = []
    for role in ROLES:
        for text in (template.opening_of(role), template.closing_of(role)):
            control += [token for token in tokenizer.added_in(text) if token not in role]
    return tokenizer.with_control(control)
