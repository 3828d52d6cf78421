"""Finds the answers in the text that a template renders from a conversation.

A template that marks them, by {% generation %}, is trusted. For others an answer is the difference
between two texts: the conversation up to the answer, with the prompt that opens it, and the
conversation including the answer. The first must be a prefix of the second, and the second of the
whole. That fails for templates that write an earlier answer differently from the last, such as
those that leave out old thoughts.

A message without a content has no such key, as in transformers 5. If a template then fails, or
leaves out a part of the message, the content is null, as in transformers 4.

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
class AnswerRequest:
    """A request: a conversation, and which messages to find (`learned`); None: only the prompt."""

    messages: list[dict[str, Any]]
    tools: list | None
    documents: list | None
    variables: dict[str, Any]
    learned: list[bool] | None
    marks: tuple[str, str]  # two characters that do not occur in the conversation
    size: int  # characters of the conversation
    stops: list[str]  # the texts at which a model stops


class Renders(Protocol):
    """A renderer of conversations, such as `jinja_program.Templates`."""

    @property
    def marks_answers(self) -> bool: ...

    def render(
        self,
        request: AnswerRequest,
        messages: list[dict],
        marks: tuple[str, str],
        *,
        prompting: bool,
    ) -> str: ...


def probe(program: Renders) -> dict[str, Any]:
    """Returns the text that a template renders from one question and its answer, taken apart.

    `text` is all of it; `opening` is the text between the question and the place where a model
    writes; `lead` and `closing` are the texts that a model writes before and after the answer
    itself. `in_parts` is True if the template reads a content only as a list of parts. A text that
    the template refuses to render is empty.
    """
    in_parts = False
    opened, whole = _tried(program, QUESTION, REPLY)
    if QUESTION not in whole or REPLY not in whole:
        parts = ([{"type": "text", "text": text}] for text in (QUESTION, REPLY))
        opened, whole_in_parts = _tried(program, *parts)
        in_parts = QUESTION in whole_in_parts and REPLY in whole_in_parts
        whole = whole_in_parts if in_parts else whole
    up_to_reply, _, closing = whole.rpartition(REPLY)
    if not up_to_reply.startswith(opened):
        opened = up_to_reply
    opening = opened.rpartition(QUESTION)[2]
    lead = up_to_reply[len(opened) :]
    return {
        "text": whole,
        "opening": opening,
        "lead": lead,
        "closing": closing,
        "in_parts": in_parts,
    }


def _tried(program: Renders, question: Any, reply: Any) -> tuple[str, str]:
    """Returns the text of a question with the opening of an answer, and that with the answer.

    A text is empty if the template refuses it.
    """
    request = AnswerRequest([], None, None, {}, None, ("", ""), 0, [])
    messages = [{"role": "user", "content": question}, {"role": ANSWERS, "content": reply}]
    before = _part(program, replace(request, messages=messages), 1, prompting=True)
    whole = _part(program, replace(request, messages=messages), 2, prompting=False)
    return before or "", whole or ""


def answer(program: Renders, request: AnswerRequest) -> dict[str, Any]:
    """Returns the answer to a request.

    `text` is the conversation and `spans` its learned parts; `left_out` are the messages of which a
    part is missing, and `never_ending` the learned ones whose end is not learned. `quotes` is True
    if arguments that are a text are written in quotes.
    """
    nulls = [{"content": None} | message for message in request.messages]
    if nulls == request.messages:
        return _answer(program, request)
    try:
        plain = _answer(program, request)
        error = None
    except Exception as raised:  # a template may raise anything for a missing content
        plain, error = None, raised
    if plain is not None and not plain["left_out"]:
        return plain
    try:
        with_nulls = _answer(program, replace(request, messages=nulls))
    except Exception:  # it may refuse nulls in any way: then they do not help
        with_nulls = None
    if plain is None and with_nulls is None:
        assert error is not None, "the first attempt failed with an error"
        raise error
    both = [result for result in (plain, with_nulls) if result is not None]
    return min(both, key=lambda result: len(result["left_out"]))


def _answer(program: Renders, request: AnswerRequest) -> dict[str, Any]:
    """Returns the answer to a request, with its messages unchanged."""
    prompting = request.learned is None
    text = program.render(request, request.messages, ("", ""), prompting=prompting)
    spans, missing, endless = [], [], []
    trial = labelled(request.messages, text)
    tried = replace(request, messages=trial.messages)
    tried_text = _part(program, tried, len(trial.messages), prompting=prompting)
    if tried_text is not None:
        missing = left_out(trial, tried_text)
    if request.learned is not None and program.marks_answers:
        spans = _marked(program, request, text)
        if tried_text is not None:
            tried_spans = _generations(program, tried, len(trial.messages))
            endless = never_ending(trial, tried_text, tried_spans, request.learned, request.stops)
    elif request.learned is not None:
        spans = _differing(program, request, text)
        learned = [at for at, learns in enumerate(request.learned) if learns]
        for at, (begin, end) in zip(learned, spans, strict=True):
            behind = _behind_content(request.messages[at], text[begin:end])
            if not any(stop in behind for stop in request.stops):
                endless.append(at)
    return {
        "text": text,
        "spans": spans,
        "left_out": missing,
        "never_ending": endless,
        "quotes": any(_is_quoted(value, text) for value in texts_of_arguments(request.messages)),
    }


def texts_of_arguments(messages: list[dict[str, Any]]) -> list[str]:
    """Returns the arguments of tool calls that are texts."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    inner = [call.get("function", call) for call in calls if isinstance(call, dict)]
    arguments = [call.get("arguments") for call in inner if isinstance(call, dict)]
    return [value for value in arguments if isinstance(value, str)]


def _is_quoted(arguments: str, text: str) -> bool:
    """Returns True if a text holds these arguments only as a quoted JSON string."""
    quoted = json.dumps(arguments, ensure_ascii=False)
    return arguments not in text and quoted in text


def _behind_content(message: dict[str, Any], written: str) -> str:
    """Returns the text that a template wrote after the content of a message; all without one."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else ""
    last_line = text.rpartition("\n")[2].strip()
    for part in (text, last_line):
        if part and part in written:
            return written.partition(part)[2]
    return written


def _marked(program: Renders, request: AnswerRequest, text: str) -> list[tuple[int, int]]:
    """Returns the spans of the generations that belong to learned messages."""
    spans = _generations(program, request, len(request.messages), text)
    assert request.learned is not None, "the request is not for a prompt"
    answers = [at for at, message in enumerate(request.messages) if message["role"] == ANSWERS]
    if all(request.learned[at] for at in answers):
        return spans
    # A message's generations are those that the conversation gains with it.
    counts = [0]
    for at in range(len(request.messages)):
        is_answer = at in answers
        more = len(_generations(program, request, at + 1)) if is_answer else counts[-1]
        counts.append(more)
    if counts != sorted(counts) or counts[-1] != len(spans):
        raise Unsuitable(
            "the template does not mark with {% generation %} which message an answer is, and not "
            "all are learned",
            "a template with one {% generation %} for each answer",
        )
    learned_spans = []
    for at, learns in enumerate(request.learned):
        if learns:
            learned_spans += spans[counts[at] : counts[at + 1]]
    return learned_spans


def _generations(
    program: Renders, request: AnswerRequest, count: int, text: str | None = None
) -> list[tuple[int, int]]:
    """Returns the spans of the generations in the text of the first `count` messages."""
    marked = program.render(request, request.messages[:count], request.marks, prompting=False)
    spans = []
    plain = ""
    opened: list[int] = []
    for piece in re.split(f"([{request.marks[0]}{request.marks[1]}])", marked):
        if piece == request.marks[0]:
            opened.append(len(plain))
        elif piece == request.marks[1]:
            begin = opened.pop() if opened else len(plain)
            if not opened:  # the outermost
                spans.append((begin, len(plain)))
        else:
            plain += piece
    if text is not None and plain != text:
        raise Unsuitable("the template writes a different text if {% generation %} is marked")
    return spans


def _differing(program: Renders, request: AnswerRequest, text: str) -> list[tuple[int, int]]:
    """Returns the spans of learned answers: each is what the answer adds to the text."""
    assert request.learned is not None, "the request is not for a prompt"
    spans = []
    for at, learns in enumerate(request.learned):
        if not learns:
            continue
        through = text
        if at + 1 < len(request.messages):
            through = _part(program, request, at + 1, prompting=False)
        before = _part(program, request, at, prompting=True)
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


def _part(program: Renders, request: AnswerRequest, count: int, *, prompting: bool) -> str | None:
    """Returns the text of the first `count` messages; None if the template refuses them alone."""
    try:
        return program.render(request, request.messages[:count], ("", ""), prompting=prompting)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # a template may raise anything to refuse a part of a conversation
        return None
