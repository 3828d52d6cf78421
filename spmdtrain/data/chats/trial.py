"""Finds out what a template does with each message, from a copy of a conversation with labels.

A label is a text that occurs nowhere else. Each content, name of a tool and arguments of a call get
one. If a label is missing, the template has left something out; the text after the last label of a
message ends it.

This runs in the process of `jinja_program.py`.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

FIRST_LABEL = 74120000  # digits: no filter of a template changes them


class Trial(NamedTuple):
    """A copy of the messages with labels, and each message's labels in the order of its fields."""

    messages: list[dict[str, Any]]
    labels: list[list[str]]


def labelled(messages: list[dict[str, Any]], text: str) -> Trial:
    """Returns a copy of messages with labels that occur neither in them nor in `text`."""
    used = json.dumps(messages, ensure_ascii=False) + text
    stem = next(str(number) for number in count(FIRST_LABEL) if str(number) not in used)
    names = (f"{stem}.{number}." for number in count())
    pairs = [_labelled_message(message, names) for message in messages]
    return Trial([message for message, _ in pairs], [labels for _, labels in pairs])


def left_out(trial: Trial, text: str) -> list[int]:
    """Returns the messages of which a part is missing in the text rendered from a trial."""
    return [
        at for at, labels in enumerate(trial.labels) if any(label not in text for label in labels)
    ]


def never_ending(
    trial: Trial,
    text: str,
    spans: Sequence[tuple[int, int]],
    learned: Sequence[bool],
    stops: Sequence[str],
) -> list[int]:
    """Returns the learned messages that have no stop in the learned text after their last label.

    `spans` are the learned parts of `text`, which a template rendered from a trial. A message of
    which nothing is learned is not among them.
    """
    places = [[text.rfind(label) for label in labels if label in text] for labels in trial.labels]
    endless = []
    for at, starts in enumerate(places):
        if not learned[at] or not any(_within(spans, start, start + 1, text) for start in starts):
            continue
        last = max(starts)
        following = [start for others in places[at + 1 :] for start in others if start > last]
        behind = _within(spans, last, min(following, default=len(text)), text)
        if not any(stop in behind for stop in stops):
            endless.append(at)
    return endless


def _within(spans: Sequence[tuple[int, int]], first: int, stop: int, text: str) -> str:
    """Returns the part of a text from `first` to `stop` that is in the spans."""
    cut = ((max(begin, first), min(end, stop)) for begin, end in spans)
    return "".join(text[begin:end] for begin, end in cut)


def _labelled_message(
    message: dict[str, Any], names: Iterator[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a message with labels, and these labels."""
    labels: list[str] = []
    changed = dict(message)
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = [part | _labelled(part, ["text"], names, labels) for part in content]
        changed["content"] = parts
    elif content is not None:
        changed |= _labelled(message, ["content"], names, labels)
    if isinstance(calls, list):
        changed["tool_calls"] = [_labelled_call(call, names, labels) for call in calls]
    return changed, labels


def _labelled_call(call: Any, names: Iterator[str], labels: list[str]) -> Any:
    """Returns a tool call with labels, which are appended to `labels`."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _labelled_call(call["function"], names, labels)}
    return call | _labelled(call, ["name", "arguments"], names, labels)


def _labelled(
    held: dict[str, Any], keys: Sequence[str], names: Iterator[str], labels: list[str]
) -> dict[str, Any]:
    """Returns the values of those keys that hold a text, each with a label."""
    changed = {}
    for key in keys:
        if _has_text(held.get(key)):
            labels.append(next(names))
            changed[key] = _with_label(held[key], labels[-1])
    return changed


def _has_text(value: Any) -> bool:
    """Returns True if a JSON value holds a text that is not white space."""
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str) and bool(value.strip())


def _with_label(value: Any, label: str) -> Any:
    """Returns a JSON value with a label around each of its texts, apart from the names of keys."""
    if isinstance(value, dict):
        return {key: _with_label(held, label) for key, held in value.items()}
    if isinstance(value, list):
        return [_with_label(held, label) for held in value]
    return f"{label}{value}{label}" if isinstance(value, str) and value.strip() else value
