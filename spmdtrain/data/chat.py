"""Turn conversations into tokens, with the loss on the answers alone.

A *conversation* is a list of messages, {"role": ..., "content": ...}. Each is written out by a
*template*, a text with the places {role} and {content}. What stands before {content} opens a
message; {content} and what stands behind it is what a model writes, and stops with.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.config.errors import ConfigError, DataError
from spmdtrain.data.tokenizer import Tokenizer

CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"
ANSWERS = "assistant"  # the role whose messages are learned


@dataclass(frozen=True)
class Template:
    """The text before and after each message of a conversation; `opening` holds {role}."""

    opening: str
    closing: str

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Return the template that a text describes. Raises ConfigError where a place is amiss."""
        opening, content, closing = text.partition("{content}")
        if not content or "{role}" not in opening or "{content}" in closing:
            raise ConfigError(
                f"the template {text!r} does not have {{role}} and then {{content}}, once",
                fix=repr(CHATML),
            )
        return cls(opening, closing)


def encode_conversation(
    messages: Any, template: Template, tokenizer: Tokenizer, where: str
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (ids int32 [tokens], loss uint8 [tokens], bytes of text).

    `loss` is 1 where a token belongs to an answer. An opening is encoded apart from what follows,
    because this is how a model will meet it: a prompt ends with an opening.

    `where` names the document. Raises DataError, with that name, where it is no conversation.
    """
    pieces: list[str] = []
    for message in _checked(messages, where):
        pieces.append(template.opening.replace("{role}", message["role"]))
        pieces.append(message["content"] + template.closing)
    encoded = tokenizer.encode_batch(pieces)
    loss = []
    for index, ids in enumerate(encoded):
        is_answer = index % 2 == 1 and messages[index // 2]["role"] == ANSWERS
        loss.append(np.full(len(ids), is_answer, np.uint8))
    size = sum(len(piece.encode()) for piece in pieces)
    return np.concatenate(encoded), np.concatenate(loss), size


def _checked(messages: Any, where: str) -> list[dict[str, str]]:
    """Return the messages of a conversation. Raises DataError where they are none."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} is not a list of messages", found=f"{messages!r:.60}")
    for message in messages:
        texts = []
        if isinstance(message, dict):
            texts = [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{where} has a message without role and content", found=f"{message!r:.60}"
            )
    return messages
