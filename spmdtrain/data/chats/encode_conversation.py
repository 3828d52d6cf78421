"""Turns conversations into tokens, with loss on the answers only.

A conversation is written out in full by its template and encoded once, so its tokens are those of
its text; no token is added. A token is learned if it holds a character of an answer, even if it
begins in the text that opens the answer.
"""

from typing import NamedTuple, Protocol

import numpy as np

from spmdtrain.data.chats.conversation import Conversation
from spmdtrain.data.chats.rendered import Frame, Written
from spmdtrain.data.tokenizers.tokenizer import Tokenizer


class Template(Protocol):
    """A way to write a conversation. Call `close()` when it is no longer needed."""

    @property
    def spec(self) -> "str | dict":
        """The JSON value from which `template_from_spec` rebuilds it."""
        ...

    @property
    def letters(self) -> str:
        """The characters that it may write, apart from those of a conversation."""
        ...

    @property
    def markers(self) -> list[str]:
        """The parts that look like special tokens."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer, in addition to the closing text."""
        ...

    @property
    def frame(self) -> Frame:
        """The texts around an answer; empty where the template refused one."""
        ...

    def write(self, conversation: Conversation, tokenizer: Tokenizer, where: str) -> Written:
        """Returns a conversation as text. Raises DataError if it cannot be written."""
        ...

    def ask(self, conversation: Conversation, tokenizer: Tokenizer, where: str) -> list[str]:
        """Returns the parts of a conversation up to the place where an answer to it begins."""
        ...

    def close(self) -> None: ...


class EncodedConversation(NamedTuple):
    """The tokens of a conversation."""

    ids: np.ndarray  # int32 [tokens]
    loss: np.ndarray  # uint8 [tokens], 1 in answers that are learned
    text_bytes: int  # of UTF-8
    has_gaps: bool = False  # the template has left out a part of a message
    never_ends: bool = False  # a learned answer has an end that is not learned
    quotes_arguments: bool = False  # the template writes arguments that are a text in quotes


def encode_conversation(
    conversation: Conversation,
    template: Template,
    tokenizer: Tokenizer,
    where: str,
    *,
    parse_special: bool = False,
    is_ended: bool = False,
) -> EncodedConversation:
    """Returns the tokens of a conversation and which of them are learned.

    Special tokens spelled in a message are text, unless `parse_special`. `where` names the
    conversation. With `is_ended` an end of text follows, which is learned if the last token is.
    Raises DataError, with that name, if the template cannot write it.
    """
    written = template.write(conversation, tokenizer, where)
    encoding = tokenizer.encode_parts(written.parts, parse_special=parse_special)
    learned = encoding.touches(written.learned).astype(np.uint8)
    size = sum(len(part.encode()) for part in written.parts)
    endless = set(written.never_ending)
    if is_ended and learned[-1:].any():
        endless.discard(len(conversation.messages) - 1)
    return EncodedConversation(
        encoding.ids, learned, size, written.has_gaps, bool(endless), written.quotes_arguments
    )


def encode_prompt(
    conversation: Conversation, template: Template, tokenizer: Tokenizer, where: str
) -> np.ndarray:
    """Returns the ids of a conversation and of the opening of an answer to it, int32 [tokens].

    They equal the ids that training sees, up to the answer. Raises DataError as
    `encode_conversation` does.
    """
    return tokenizer.encode_parts(template.ask(conversation, tokenizer, where)).ids
