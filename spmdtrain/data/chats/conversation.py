"""Reads a conversation from a row of data, in any of the usual published forms.

    messages              {"messages": [{"role": "user", "content": "..."}, ...]}
    ShareGPT              {"conversations": [{"from": "human", "value": "..."}, ...]}
    prompt and completion {"prompt": ..., "completion": ...}, each a text or a list of messages

A row may also have a `system` text, `tools`, `documents` and `chat_template_kwargs`: variables of
the template. All but the texts may be JSON in a text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.joined_prompts import echoes, seam
from spmdtrain.data.chats.json_texts import messages_of, refuse_messages, value_of
from spmdtrain.data.chats.roles import ANSWERS, ASKS

# Where a conversation may be in a row, in this order.
PROMPT = "prompt"
FORMS = (("messages",), ("conversations",), (PROMPT, "completion"))
PAIR = ("chosen", "rejected")
OTHERS = ("system", "tools", "documents", "chat_template_kwargs")
DEEPEST = 100  # levels of lists and objects in a conversation
ROLES_OF_SHAREGPT = {
    "human": ASKS,
    "user": ASKS,
    "gpt": ANSWERS,
    "chatgpt": ANSWERS,
    "bot": ANSWERS,
    "model": ANSWERS,
    "assistant": ANSWERS,
    "function_call": ANSWERS,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class ChatFields:
    """The fields of a row that belong to its conversation; `named` is the one that holds it."""

    named: str | None = None  # None: the first of FORMS that the row has
    pairs: bool = False  # a row holds two answers, one preferred to the other

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """The sets of fields that may hold a conversation, or a pair."""
        if self.pairs:
            return (PAIR,)
        return ((self.named,),) if self.named else FORMS

    def form_in(self, names: Iterable[str]) -> tuple[str, ...] | None:
        """Returns the fields that hold the conversation of a row with these names."""
        names = set(names)
        return next((form for form in self.forms if names.issuperset(form)), None)

    def chosen(self, names: Iterable[str]) -> list[str] | None:
        """Returns all fields of a conversation among these names; None if there is none."""
        names = list(names)
        form = self.form_in(names)
        if form is None:
            return None
        others = (PROMPT, *OTHERS) if self.pairs else OTHERS
        return [*form, *(name for name in others if name in names)]


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, and the other variables of its template.

    A message has a `role` and usually a `content`, both text; other keys are as in the data.
    """

    messages: list[dict[str, Any]]
    learned: tuple[bool, ...]  # of each message
    tools: list | None = None
    documents: list | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    repeats: bool = False  # the answer to the prompt, a text, begins with the prompt

    @property
    def texts(self) -> Iterator[str]:
        """The texts in it, including those in tool calls and the names of keys."""
        for value in (self.messages, self.tools, self.documents, self.variables):
            yield from _texts(value)

    def with_last_answer_only(self) -> "Conversation":
        """Returns the conversation up to its last learned answer, the only one still learned."""
        last = max((at for at, is_in in enumerate(self.learned) if is_in), default=-1)
        if last < 0:
            return self
        learned = (False,) * last + (True,)
        return replace(self, messages=self.messages[: last + 1], learned=learned)


def read_conversation(
    row: dict[str, Any] | None, fields: ChatFields, where: str
) -> Conversation | None:
    """Returns the conversation of a row; None if the row is empty.

    `where` names the row. Raises DataError, with that name, if it holds no conversation.
    """
    form = None if row is None else fields.form_in(row)
    if row and form and len(form) == 1:
        row = row | {form[0]: messages_of(row[form[0]])}
    if row is None or (form and all(row[name] is None for name in form)):
        return None
    if form is None:
        if not set(row).isdisjoint(FORMS[-1]):
            raise DataError(f"{where} has a prompt or a completion, not both")
        return None  # a row of a table that is null
    if len(form) == 1:
        return _with_others(of_messages(row[form[0]], f"{where}: {form[0]!r}"), row, where)
    prompt, completion = (row[name] for name in form)
    conversation, first = _joined(_prompt_of(row, where), completion, f"{where}: {form[1]!r}")
    conversation = replace(_learned_from(conversation, first), repeats=echoes(prompt, completion))
    return _with_others(conversation, row, where)


def read_pair(row: dict[str, Any] | None, where: str) -> tuple[Conversation, Conversation] | None:
    """Returns the conversations with the chosen and with the rejected answer of a row.

    Each answer is a text or messages. A prompt that both repeat is written once. Their common
    beginning is not learned. None if the row is empty. Raises DataError, with the name `where`, if
    it holds no pair.
    """
    if row is None or not set(row).issuperset(PAIR) or all(row[name] is None for name in PAIR):
        if row and not set(row).isdisjoint(PAIR):
            raise DataError(f"{where} has a chosen or a rejected answer, not both")
        return None
    prompt = None if row.get(PROMPT) is None else _prompt_of(row, where)
    repeats = all(echoes(row.get(PROMPT), row[name]) for name in PAIR)
    both = []
    for name in PAIR:
        answer = row[name][len(row[PROMPT]) :] if repeats else row[name]
        whole, _ = _joined(prompt, answer, f"{where}: {name!r}")
        both.append(_with_others(replace(whole, repeats=repeats), row, where))
    chosen, rejected = both
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    shared = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if shared is None:
        shared = min(len(chosen.messages), len(rejected.messages)) - 1
    if shared < 1:
        raise DataError(f"{where} has no prompt: its answers share no message", fix="a prompt")
    return _learned_from(chosen, shared), _learned_from(rejected, shared)


def _learned_from(conversation: Conversation, first: int) -> Conversation:
    """Returns a conversation that is learned from the message `first` on."""
    learned = tuple(is_in and at >= first for at, is_in in enumerate(conversation.learned))
    return replace(conversation, learned=learned)


def of_messages(messages: Any, where: str) -> Conversation:
    """Returns the conversation of a list of messages, in the keys of either form.

    `where` names the list. Raises DataError, with that name, if a message is not one.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} is not a list of messages", found=f"{messages!r:.60}")
    _check_depth(messages, where)
    checked = [_message(message, where) for message in messages]
    return Conversation(
        [message for message, _ in checked], tuple(learned for _, learned in checked)
    )


def _prompt_of(row: dict[str, Any], where: str) -> Conversation:
    return _as_conversation(row[PROMPT], ASKS, f"{where}: {PROMPT!r}")


def _as_conversation(value: Any, role: str, where: str) -> Conversation:
    """Returns the conversation of messages, or of a text, which is a message of `role`."""
    if isinstance(value, str):
        refuse_messages(value, where)
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} is neither a text nor messages", found=f"{value!r:.60}")
    return of_messages(value, where)


def _joined(prompt: Conversation | None, answer: Any, where: str) -> tuple[Conversation, int]:
    """Returns the conversation of a prompt and its answer, and how many messages are the prompt."""
    answered = _as_conversation(answer, ANSWERS, where)
    if prompt is None:
        return answered, 0
    of_prompt, first = seam(prompt.messages, answered.messages, where)
    messages = prompt.messages[:of_prompt] + answered.messages
    return Conversation(messages, prompt.learned[:of_prompt] + answered.learned), first


def _with_others(conversation: Conversation, row: dict, where: str) -> Conversation:
    """Returns the conversation with the system text, tools, documents and variables of its row."""
    system = row.get("system")
    if system not in (None, ""):
        if not isinstance(system, str) or conversation.messages[0]["role"] == "system":
            raise DataError(f"{where} has two system texts, or one that is not a text")
        first = {"role": "system", "content": system}
        conversation = replace(
            conversation,
            messages=[first, *conversation.messages],
            learned=(False, *conversation.learned),
        )
    tools, documents = (_list(row.get(name), f"{where}: {name!r}") for name in OTHERS[1:3])
    variables = value_of(row.get(OTHERS[3]), f"{where}: {OTHERS[3]!r}")
    if not isinstance(variables or {}, dict):
        raise DataError(f"{where}: {OTHERS[3]!r} is not an object", found=f"{variables!r:.60}")
    _check_depth([tools, documents, variables], where)
    conversation = replace(
        conversation, tools=tools, documents=documents, variables=variables or {}
    )
    for text in conversation.texts:
        _check_text(text, where)
    return conversation


def _list(value: Any, where: str) -> list | None:
    value = value_of(value, where)
    if value in (None, [], {}):
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(f"{where} is not a list of objects", found=f"{value!r:.60}")
    return value


# --- one message ----------------------------------------------------------------------------------


def _message(message: Any, where: str) -> tuple[dict[str, Any], bool]:
    """Returns a message in the keys that templates read, and whether it is learned."""
    if not isinstance(message, dict):
        raise DataError(f"{where} has a message without role and content", found=f"{message!r:.60}")
    if "from" in message and "role" not in message:
        message = _of_sharegpt(message, where)
    # Tables store a key that a message lacks as None.
    others = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "weight") and value is not None
    }
    role, content = message.get("role"), _content(message.get("content"), where)
    holds_more = any(value not in ("", [], {}) for value in others.values())
    if not isinstance(role, str) or not role or (content is None and not holds_more):
        raise DataError(f"{where} has a message without role and content", found=f"{message!r:.60}")
    if "tool_calls" in others:
        others["tool_calls"] = _list(others["tool_calls"], f"{where}: 'tool_calls'") or []
    checked = {"role": role} | ({} if content is None else {"content": content}) | others
    for text in _texts(checked):
        _check_text(text, where)
    return checked, _is_learned(role, message.get("weight"), where)


def _of_sharegpt(message: dict, where: str) -> dict[str, Any]:
    """Returns a message of ShareGPT in the usual keys."""
    name, value = message["from"], message.get("value")
    others = {key: held for key, held in message.items() if key not in ("from", "value")}
    role = ROLES_OF_SHAREGPT.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(
            f"{where} has a message from {name!r:.40}",
            fix=f"one of {', '.join(ROLES_OF_SHAREGPT)}, or the keys role and content",
        )
    if name == "function_call":
        call = value_of(value, f"{where} has a message whose value")
        return {"role": role, "tool_calls": [{"type": "function", "function": call}]} | others
    return {"role": role, "content": value} | others


def _content(content: Any, where: str) -> str | None:
    """Returns the text of a message, which may come in parts; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"{where} has a message with a content that is not a text", found=f"{content!r:.60}"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in (None, "text") or not isinstance(text, str):
            raise DataError(
                f"{where} has a message with a part that is not a text", found=f"{part!r:.60}"
            )
        texts.append(text)
    return "".join(texts) if texts else None


def _is_learned(role: str, weight: Any, where: str) -> bool:
    """Returns True if a message is learned: an answer is, unless its weight is 0."""
    if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
        raise DataError(f"{where} has a message with a weight that is not 0 or 1: {weight!r:.40}")
    if weight and role != ANSWERS:
        raise DataError(
            f"{where} has a message of {role!r} with weight 1: answers of {ANSWERS!r} alone are "
            "learned"
        )
    return role == ANSWERS and weight != 0


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value, including the names of keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from _texts(key)
            yield from _texts(held)
    elif isinstance(value, list):
        for held in value:
            yield from _texts(held)


def _check_depth(value: Any, where: str) -> None:
    """Raises DataError if a JSON value is nested more than DEEPEST levels."""
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for held in level:
            if isinstance(held, dict):
                inner += held.values()
            elif isinstance(held, list):
                inner += held
        level = inner
        if not level:
            return
    raise DataError(f"{where} is nested too deeply", found=f"more than {DEEPEST} levels")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has a message that is not a text: half a surrogate pair at position "
            f"{error.start}"
        ) from None
