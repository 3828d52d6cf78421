"""Joins a prompt with what answers it, which in published data may hold the prompt again.

An answer of messages is the whole conversation if it holds those of the prompt, and goes on with
the prompt if it begins with an answer. An answer that is a text and begins with the prompt cannot
be told from an echo: "Hello" is answered by "Hello there". Two answers that both do so repeat it.
"""

from typing import Any, NamedTuple

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.roles import ANSWERS, ASKS

Message = dict[str, Any]


class Seam(NamedTuple):
    """A seam of a prompt and its answer: the first `of_prompt` messages, then the answer.

    The messages before `first` are the prompt.
    """

    of_prompt: int
    first: int


def seam(prompt: list[Message], answer: list[Message], where: str) -> Seam:
    """Returns how to join the messages of a prompt and of an answer, with the prompt in it once.

    Raises DataError, with the name `where`, if the answer begins with a question that is not the
    prompt.
    """
    asked, answered = ([_key(message) for message in each] for each in (prompt, answer))
    starts_anew = answer[0]["role"] != ANSWERS
    for begin in range(len(answer) - len(prompt) if prompt and starts_anew else 0):
        end = begin + len(prompt)
        if answered[begin:end] == asked:
            return Seam(0, end)
    is_open = bool(prompt) and prompt[-1]["role"] == ASKS
    if not is_open or answer[0]["role"] not in (ASKS, "system"):
        return Seam(len(prompt), len(prompt))
    for begin in range(1, len(prompt)):
        overlap = len(prompt) - begin
        if asked[begin:] == answered[:overlap] and len(answer) > overlap:
            return Seam(begin, len(prompt))
    raise DataError(
        f"{where} begins with a message of {answer[0]['role']!r}, and does not hold the prompt",
        fix="rows without the prompt, or answers that go on with it",
    )


def echoes(prompt: Any, answer: Any) -> bool:
    """Returns True if an answer that is a text begins with the text of the prompt and goes on."""
    if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt.strip():
        return False
    if not answer.startswith(prompt) or not answer[len(prompt) :].strip():
        return False
    return prompt[-1].isspace() or answer[len(prompt)].isspace() or prompt[-1] == ":"


def _key(message: Message) -> Message:
    """Returns what makes two messages equal: all of it, but for white space around the content."""
    content = message.get("content")
    return message | ({"content": content.strip()} if content is not None else {})
