"""Applies a Jinja template, as published with a model. Its code runs in a separate process.

Special tokens spelled in a conversation must not become tokens, and templates may cut and trim its
texts. So each spelled token passes through the template as a stand-in, a few characters that occur
nowhere else, and is put back into the result.
"""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.answers import texts_of_arguments
from spmdtrain.data.chats.conversation import Conversation
from spmdtrain.data.chats.rendered import MARKER, Frame, Written, check_role
from spmdtrain.data.chats.stops import stop_texts
from spmdtrain.data.chats.tool_calls import PARSE_ARGUMENTS, with_parsed_arguments
from spmdtrain.data.tokenizers.tokenizer import Tokenizer

SECONDS = 5  # of computing that a template may take for a conversation
ANOTHER = "another template: spmdtrain data prepare --chat --chat-template FILE"
FIRST_PRIVATE = 0xF0000  # characters from here on are for private use
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spmdtrain.data.chats.jinja_program import main; main()"
)


class JinjaText(NamedTuple):
    """The source of a template, as it is stored with token files and in a run's config."""

    text: str
    for_tools: str | None = None  # for conversations with tools; None: the same
    tokens: dict[str, str] = {}  # special tokens by their names, `bos_token` etc.
    variables: dict[str, Any] = {}  # that the user has set
    ends: tuple[int, ...] = ()  # ids that end an answer
    parses_arguments: bool = False  # a tool call's arguments are read as JSON if they are a text

    @property
    def letters(self) -> str:
        """The characters that it may write, apart from those of a conversation."""
        return "".join([self.text, self.for_tools or "", *self.tokens.values()])

    @property
    def spec(self) -> dict[str, Any]:
        """The JSON value that describes it."""
        return {
            "jinja": self.text,
            "for_tools": self.for_tools,
            "tokens": self.tokens,
            "variables": self.variables,
            "ends": list(self.ends),
            "parses_arguments": self.parses_arguments,
        }


class JinjaTemplate:
    """A template that is ready to write. `close()` ends its process."""

    def __init__(self, source: JinjaText, today: str | None = None, seconds: int = SECONDS):
        """Starts the template's process.

        `today` is the date that a template may write, as YYYY-MM-DD.
        """
        self._source = source
        self._today = today or date.today().isoformat()
        self._seconds = seconds
        self._process: subprocess.Popen | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """The JSON value from which `template_from_spec` rebuilds it."""
        return self._source.spec

    @property
    def letters(self) -> str:
        """The characters that it may write, apart from those of a conversation."""
        return self._source.letters

    @property
    def markers(self) -> list[str]:
        """The parts that look like special tokens, around a question and an answer."""
        return list(dict.fromkeys(MARKER.findall(self._tried["text"])))

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return self._source.ends

    @property
    def frame(self) -> Frame:
        """The texts around an answer; empty where the template refused one."""
        return Frame(self._tried["opening"], self._tried["lead"], self._tried["closing"])

    def write(self, conversation: Conversation, tokenizer: Tokenizer, where: str) -> Written:
        """Returns a conversation as text. Raises DataError if it cannot be written."""
        return self._written(conversation, tokenizer, where, list(conversation.learned))

    def ask(self, conversation: Conversation, tokenizer: Tokenizer, where: str) -> list[str]:
        """Returns the parts of a conversation up to the place where an answer to it begins."""
        return self._written(conversation, tokenizer, where, None).parts

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def __enter__(self) -> "JinjaTemplate":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def _both(self) -> str:
        return self._source.text + (self._source.for_tools or "")

    # --- one conversation -------------------------------------------------------------------------

    def _written(
        self,
        conversation: Conversation,
        tokenizer: Tokenizer,
        where: str,
        learned: list[bool] | None,
    ) -> Written:
        self._refuse_unread(conversation, where)
        for message in conversation.messages:
            check_role(message["role"], self.markers, tokenizer, where)
        quote, *marks = _unused(3, self._both, *conversation.texts)
        spelled: list[str] = []

        def covered(text: str) -> str:
            """Returns a text with a stand-in for each special token that it spells."""
            done = 0
            pieces = []
            for start, end in tokenizer.special_spans(text):
                pieces += [text[done:start], f"{quote}{len(spelled)}{quote}"]
                spelled.append(text[start:end])
                done = end
            return "".join([*pieces, text[done:]])

        messages = conversation.messages
        if self._source.parses_arguments:
            messages = with_parsed_arguments(messages)
        messages = _with_texts(messages, covered)
        request = {
            "messages": _in_parts(messages) if self._tried["in_parts"] else messages,
            "tools": _with_texts(conversation.tools, covered),
            "documents": _with_texts(conversation.documents, covered),
            "variables": _with_texts(conversation.variables, covered),
            "learned": learned,
            "marks": marks,
            "size": sum(map(len, conversation.texts)),
            "stops": stop_texts(self, tokenizer),
        }
        answer = self._answer(request, where)
        text = answer["text"]
        is_learned = np.zeros(len(text), bool)
        for begin, end in answer["spans"]:
            is_learned[begin:end] = True
        parts, learned_of_parts = _uncovered(text, is_learned, quote, spelled, where)
        return Written(
            parts,
            learned_of_parts,
            has_gaps=bool(answer["left_out"]),
            never_ending=tuple(answer["never_ending"]),
            quotes_arguments=answer["quotes"],
        )

    def _refuse_unread(self, conversation: Conversation, where: str) -> None:
        """Raises DataError for a key that the template does not read: its value would be lost."""
        named = {
            key: "a message with"
            for message in conversation.messages
            for key, value in message.items()
            if key in ("role", "content") or value not in ("", [], {})
        }
        named |= {"tools": "the field"} if conversation.tools else {}
        named |= {"documents": "the field"} if conversation.documents else {}
        named |= dict.fromkeys(conversation.variables, "the variable")
        for key, what in named.items():
            if not self._reads(key):
                raise DataError(
                    f"{where} has {what} {key!r}, which the template does not read",
                    fix="a template that does, or data without it",
                )

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self._both) is not None

    # --- the process ------------------------------------------------------------------------------

    @cached_property
    def _tried(self) -> dict[str, Any]:
        """The result of trying the template with one question and an answer."""
        for name in self._source.variables:
            if not self._reads(name):
                raise DataError(f"the template does not read the variable {name!r}")
        return self._start()

    def _start(self) -> dict[str, Any]:
        if importlib.util.find_spec("jinja2") is None:
            raise DataError(
                "templates of conversations need the package `jinja2`, which is not installed",
                fix="pip install jinja2",
            )
        # Ctrl-C ends this process, which ends the other.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        first = {
            "text": self._source.text,
            "text_for_tools": self._source.for_tools,
            "names": self._source.tokens | self._source.variables,
            "date": self._today,
            "seconds": self._seconds,
        }
        return self._exchange(first, "")

    def _answer(self, request: dict[str, Any], where: str) -> dict[str, Any]:
        if self._process is None:
            self._start()
        return self._exchange(request, where)

    def _exchange(self, request: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns the process's answer. Raises DataError if the template has failed.

        `where` names the conversation; it is empty for one that only tries out the template.
        """
        at = f"{where}: " if where else ""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        line = b""
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        except TypeError as error:  # a column of times, say
            raise DataError(f"{where} holds a value that JSON does not have: {error}") from None
        if not line.endswith(b"\n"):
            process.kill()
            code = process.wait()
            self._process = None
            cause = f"it has ended with the code {code}"
            if code == -signal.SIGXCPU:
                cause = f"it computes for longer than {self._seconds} seconds"
            raise DataError(f"{at}the template has failed: {cause}", fix="" if where else ANOTHER)
        answer = json.loads(line)
        if "error" in answer:
            may_want_values = texts_of_arguments(request.get("messages", []))
            fix = answer["fix"] or (PARSE_ARGUMENTS if may_want_values else "")
            fix = fix or ("" if where else ANOTHER)
            raise DataError(f"{at}{answer['error']}", fix=fix)
        return answer


# --- texts and stand-ins --------------------------------------------------------------------------


def _unused(count: int, *texts: str) -> list[str]:
    """Returns characters that occur in none of the texts."""
    used = set().union(*texts)
    unused: list[str] = []
    point = FIRST_PRIVATE
    while len(unused) < count:
        if chr(point) not in used:
            unused.append(chr(point))
        point += 1
    return unused


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with each of its texts changed, including the names of keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _with_texts(held, change) for key, held in value.items()}
    if isinstance(value, list):
        return [_with_texts(held, change) for held in value]
    return value


def _in_parts(messages: list[dict]) -> list[dict]:
    """Returns messages with each content as a list of one part."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if "content" in message
        else message
        for message in messages
    ]


def _uncovered(
    text: str, is_learned: np.ndarray, quote: str, spelled: list[str], where: str
) -> tuple[list[str], np.ndarray]:
    """Replaces stand-ins, and returns parts: alternately the template's text and others'."""
    parts: list[str] = []
    flags = []
    done = 0
    for match in re.finditer(f"{quote}([0-9]+){quote}", text):
        others = spelled[int(match[1])]
        parts += [text[done : match.start()], others]
        flags += [
            is_learned[done : match.start()],
            np.full(len(others), is_learned[match.start()]),
        ]
        done = match.end()
    parts.append(text[done:])
    if any(quote in part for part in parts):
        raise DataError(
            f"{where}: the template cuts a special token that a message spells, {spelled[0]!r:.40}"
        )
    return parts, np.concatenate([*flags, is_learned[done:]])
