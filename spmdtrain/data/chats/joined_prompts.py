"""Joins a prompt with its answer, which in published data may contain the prompt again.

An answer in messages is the whole conversation if it contains those of the prompt, and continues
the prompt if it begins with an answer. If an answer is a text that begins with the prompt, it may
repeat the prompt or happen to begin alike, as "Hello there" does after "Hello". If both answers of
a pair begin so, they repeat it.
"""

from typing import Any, NamedTuple

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.roles import ANSWERS, ASKS

Message = dict[str, Any]


class Seam(NamedTuple):
    """The way to join a prompt and its answer: the first `of_prompt` messages, then the answer.

    In the result the messages before `first` are the prompt.
    """

    of_prompt: int
    first: int


def seam(prompt: list[Message], answer: list[Message], where: str) -> Seam:
    """Returns how to join the messages of a prompt and of an answer, with the prompt only once.

    Raises DataError, with the name `where`, if the answer begins with a question that is not the
    prompt.
    """
    question = [_key(message) for message in prompt]
    answered = [_key(message) for message in answer]
    starts_anew = answer[0]["role"] != ANSWERS
    for begin in range(len(answer) - len(prompt) if prompt and starts_anew else 0):
        end = begin + len(prompt)
        if answered[begin:end] == question:
            return Seam(0, end)
    is_open = bool(prompt) and prompt[-1]["role"] == ASKS
    if not is_open or answer[0]["role"] not in (ASKS, "system"):
        return Seam(len(prompt), len(prompt))
    for begin in range(1, len(prompt)):
        overlap = len(prompt) - begin
        if question[begin:] == answered[:overlap] and len(answer) > overlap:
            return Seam(begin, len(prompt))
    raise DataError(
        f"{where} begins with a message of {answer[0]['role']!r}, and does not hold the prompt",
        fix="rows without the prompt, or answers that go on with it",
    )


def echoes(prompt: Any, answer: Any) -> bool:
    """Returns True if prompt and answer are texts, and the answer begins with the prompt."""
    if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt.strip():
        return False
    if not answer.startswith(prompt) or not answer[len(prompt) :].strip():
        return False
    return prompt[-1].isspace() or answer[len(prompt)].isspace() or prompt[-1] == ":"


def _key(message: Message) -> Message:
    """Returns the message without the white space around its content, for comparisons."""
    content = message.get("content")
    return message | ({"content": content.strip()} if content is not None else {})
