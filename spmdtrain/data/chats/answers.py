"""Finds the answers in the text that a template makes of a conversation.

A template that marks them, by {% generation %}, is trusted. For others an answer is the difference
between two texts: the conversation up to the answer, with the prompt that opens it, and the
conversation including the answer. The first must be a prefix of the second, and the second of the
whole. That fails for templates that write an earlier answer differently from the last, such as
those that leave out old thoughts.

A message without a content has no such key, as in transformers 5. Where a template then leaves out
what the message holds, or fails, its content is null, as in transformers 4.

This runs in the process of `jinja_program.py`.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spmdtrain.data.chats.roles import ANSWERS
from spmdtrain.data.chats.trial import labelled, left_out, never_ending

QUESTION, REPLY = "a question 7412", "a reply 7412"  # to try out a template


OTHER_WAYS = "--last-answer-only, or --chat-template FILE with {% generation %}"


class Unsuitable(Exception):
    """The reason why a template or a conversation cannot be used, and what to try."""

    def __init__(self, what: str, fix: str = ""):
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class Asked:
    """A request: a conversation, and which messages to find (`learned`); None: only the prompt."""

    messages: list[dict[str, Any]]
    tools: list | None
    documents: list | None
    variables: dict[str, Any]
    learned: list[bool] | None
    marks: tuple[str, str]  # two characters that are nowhere in the conversation
    size: int  # characters of the conversation
    stops: list[str]  # the texts at which a model stops


class Renders(Protocol):
    """A renderer of conversations, such as `jinja_program.Templates`."""

    @property
    def marks_answers(self) -> bool: ...

    def render(
        self, asked: Asked, messages: list[dict], marks: tuple[str, str], *, prompting: bool
    ) -> str: ...


def probe(program: Renders) -> dict[str, Any]:
    """Returns what a template makes of one question and an answer to it.

    `text` is all of it; `opening` is the text between the question and the place where a model
    writes; `lead` and `closing` are what a model writes before and after the answer itself.
    `in_parts` is True if the template reads a content only as a list of parts. What a template
    refuses is empty.
    """
    in_parts = False
    asked, whole = _tried(program, QUESTION, REPLY)
    if QUESTION not in whole or REPLY not in whole:
        parts = ([{"type": "text", "text": each}] for each in (QUESTION, REPLY))
        asked, whole_in_parts = _tried(program, *parts)
        in_parts = QUESTION in whole_in_parts and REPLY in whole_in_parts
        whole = whole_in_parts if in_parts else whole
    up_to_reply, _, closing = whole.rpartition(REPLY)
    if not up_to_reply.startswith(asked):
        asked = up_to_reply
    opening = asked.rpartition(QUESTION)[2]
    lead = up_to_reply[len(asked) :]
    return {
        "text": whole,
        "opening": opening,
        "lead": lead,
        "closing": closing,
        "in_parts": in_parts,
    }


def _tried(program: Renders, question: Any, reply: Any) -> tuple[str, str]:
    """Returns the text of a question with the opening of an answer, and with the answer; empty if
    refused.
    """
    asked = Asked([], None, None, {}, None, ("", ""), 0, [])
    messages = [{"role": "user", "content": question}, {"role": ANSWERS, "content": reply}]
    before = _part(program, replace(asked, messages=messages), 1, prompting=True)
    whole = _part(program, replace(asked, messages=messages), 2, prompting=False)
    return before or "", whole or ""


def answer(program: Renders, asked: Asked) -> dict[str, Any]:
    """Returns the answer to a request.

    `text` is the conversation and `spans` are what is learned of it; `left_out` are the messages of
    which a part is missing, `never_ending` those that are learned without what ends them. `quotes`
    is True if a text of arguments is written in quotes.
    """
    nulls = [{"content": None} | message for message in asked.messages]
    if nulls == asked.messages:
        return _answer(program, asked)
    try:
        found = _answer(program, asked)
        error = None
    except Exception as raised:  # a template may raise anything for a content that is not there
        found, error = None, raised
    if found is not None and not found["left_out"]:
        return found
    try:
        with_nulls = _answer(program, replace(asked, messages=nulls))
    except Exception:  # it may refuse nulls in its own way: then they are no way to write it
        with_nulls = None
    if found is None and with_nulls is None:
        assert error is not None, "what failed has said why"
        raise error
    both = [each for each in (found, with_nulls) if each is not None]
    return min(both, key=lambda each: len(each["left_out"]))


def _answer(program: Renders, asked: Asked) -> dict[str, Any]:
    """Returns the answer to a request whose messages the template sees as they are."""
    prompting = asked.learned is None
    text = program.render(asked, asked.messages, ("", ""), prompting=prompting)
    spans, missing, endless = [], [], []
    trial = labelled(asked.messages, text)
    tried = replace(asked, messages=trial.messages)
    tried_text = _part(program, tried, len(trial.messages), prompting=prompting)
    if tried_text is not None:
        missing = left_out(trial, tried_text)
    if asked.learned is not None and program.marks_answers:
        spans = _marked(program, asked, text)
        if tried_text is not None:
            tried_spans = _generations(program, tried, len(trial.messages))
            endless = never_ending(trial, tried_text, tried_spans, asked.learned, asked.stops)
    elif asked.learned is not None:
        spans = _differing(program, asked, text)
        learned = [at for at, learns in enumerate(asked.learned) if learns]
        for at, (begin, end) in zip(learned, spans, strict=True):
            behind = _behind_content(asked.messages[at], text[begin:end])
            if not any(stop in behind for stop in asked.stops):
                endless.append(at)
    return {
        "text": text,
        "spans": spans,
        "left_out": missing,
        "never_ending": endless,
        "quotes": any(_is_quoted(each, text) for each in texts_of_arguments(asked.messages)),
    }


def texts_of_arguments(messages: list[dict[str, Any]]) -> list[str]:
    """Returns the arguments of tool calls that are texts."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    inner = [call.get("function", call) for call in calls if isinstance(call, dict)]
    arguments = [call.get("arguments") for call in inner if isinstance(call, dict)]
    return [each for each in arguments if isinstance(each, str)]


def _is_quoted(arguments: str, text: str) -> bool:
    """Returns True if a text has these arguments as JSON has a text, and not as they are."""
    quoted = json.dumps(arguments, ensure_ascii=False)
    return arguments not in text and quoted in text


def _behind_content(message: dict[str, Any], written: str) -> str:
    """Returns what a template has written behind the content of a message; all, without one."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else ""
    last_line = text.rpartition("\n")[2].strip()
    for part in (text, last_line):
        if part and part in written:
            return written.partition(part)[2]
    return written


def _marked(program: Renders, asked: Asked, text: str) -> list[tuple[int, int]]:
    """Returns the spans of the generations that belong to learned messages."""
    spans = _generations(program, asked, len(asked.messages), text)
    assert asked.learned is not None, "it is asked for"
    answers = [at for at, message in enumerate(asked.messages) if message["role"] == ANSWERS]
    if all(asked.learned[at] for at in answers):
        return spans
    # The generations of a message are those that the conversation has only with it.
    counts = [0]
    for at in range(len(asked.messages)):
        is_answer = at in answers
        more = len(_generations(program, asked, at + 1)) if is_answer else counts[-1]
        counts.append(more)
    if counts != sorted(counts) or counts[-1] != len(spans):
        raise Unsuitable(
            "the template does not mark with {% generation %} which message an answer is, and not "
            "all are learned",
            "a template with one {% generation %} for each answer",
        )
    kept = []
    for at, learns in enumerate(asked.learned):
        if learns:
            kept += spans[counts[at] : counts[at + 1]]
    return kept


def _generations(
    program: Renders, asked: Asked, count: int, text: str | None = None
) -> list[tuple[int, int]]:
    """Returns the spans of the generations in the text of the first `count` messages."""
    marked = program.render(asked, asked.messages[:count], asked.marks, prompting=False)
    spans = []
    plain = ""
    opened: list[int] = []
    for piece in re.split(f"([{asked.marks[0]}{asked.marks[1]}])", marked):
        if piece == asked.marks[0]:
            opened.append(len(plain))
        elif piece == asked.marks[1]:
            begin = opened.pop() if opened else len(plain)
            if not opened:  # the outermost
                spans.append((begin, len(plain)))
        else:
            plain += piece
    if text is not None and plain != text:
        raise Unsuitable("the template writes a different text if {% generation %} is marked")
    return spans


def _differing(program: Renders, asked: Asked, text: str) -> list[tuple[int, int]]:
    """Returns the spans of learned answers, found from what each adds to the text."""
    assert asked.learned is not None, "it is asked for"
    spans = []
    for at, learns in enumerate(asked.learned):
        if not learns:
            continue
        through = text
        if at + 1 < len(asked.messages):
            through = _part(program, asked, at + 1, prompting=False)
        before = _part(program, asked, at, prompting=True)
        if before is None or through is None or not through.startswith(before):
            raise Unsuitable(
                f"message {at + 1}: the template does not write it after what opens an answer",
                OTHER_WAYS,
            )
        if not text.startswith(through):
            raise Unsuitable(
                f"message {at + 1}: the template writes an answer differently once a later "
                "message follows",
                OTHER_WAYS,
            )
        spans.append((len(before), len(through)))
    return spans


def _part(program: Renders, asked: Asked, count: int, *, prompting: bool) -> str | None:
    """Returns the text of the first `count` messages; None if the template refuses them alone."""
    try:
        return program.render(asked, asked.messages[:count], ("", ""), prompting=prompting)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # a template may raise anything to refuse a part of a conversation
        return None
