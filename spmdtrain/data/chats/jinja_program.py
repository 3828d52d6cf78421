"""Renders the Jinja templates of published models, in a separate process.

A template is foreign code. It runs in Jinja's sandbox, which denies it attributes and
changes to its input, and the process has limited memory, and limited time for each conversation.
The process reads a line of JSON and writes one, until its input ends.

The first line is {"text", "text_for_tools", "names", "date", "seconds"}, each later one an
`AnswerRequest` (answers.py). An answer is {"error", "fix"} if the template has failed.

Jinja's settings are those of transformers, whose templates these are: blocks leave no white space,
`break` and `continue`, `tojson` for people rather than HTML, `raise_exception`, `strftime_now`, and
the tag {% generation %}, which encloses the text that the model writes.
"""

import json
import resource
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmdtrain.data.chats.answers import AnswerRequest, Unsuitable, answer, probe

MEMORY = 2**30  # bytes that the process may have
# A text may have this many characters more than ten for each of its conversation's.
SPARE_LENGTH = 2**20
LONGEST_ERROR = 300  # characters of an error's text


class Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}: a render puts its text between marks."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        assert isinstance(self.environment, Environment)
        self.environment.marks_answers = True
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        assert isinstance(self.environment, Environment)
        opening, closing = self.environment.marks
        return f"{opening}{caller()}{closing}"


class Environment(ImmutableSandboxedEnvironment):
    """The environment of one or two templates of a model."""

    def __init__(self, date: datetime):
        self.marks_answers = False  # a template has {% generation %}
        self.marks: tuple[str, str] = ("", "")  # the marks around a generation
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = date.strftime


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class Templates:
    """The templates of one model, ready to render."""

    def __init__(self, first: dict[str, Any]):
        self._environment = Environment(datetime.fromisoformat(first["date"]))
        self._template = self._environment.from_string(first["text"])
        self._for_tools = self._template
        if first["text_for_tools"] is not None:
            self._for_tools = self._environment.from_string(first["text_for_tools"])
        self._names = first["names"]  # of special tokens, and the user's own variables

    @property
    def marks_answers(self) -> bool:
        return self._environment.marks_answers

    def render(
        self,
        request: AnswerRequest,
        messages: list[dict],
        marks: tuple[str, str],
        *,
        prompting: bool,
    ) -> str:
        """Returns the text of messages, with `prompting` followed by the opening of an answer.

        Raises Unsuitable if it is much longer than the conversation.
        """
        template = self._for_tools if request.tools else self._template
        self._environment.marks = marks
        names = self._names | request.variables
        names |= {
            "messages": messages,
            "tools": request.tools,
            "documents": request.documents,
            "add_generation_prompt": prompting,
        }
        return _bounded(template.generate(**names), 10 * request.size + SPARE_LENGTH)


def _bounded(pieces: Iterable[str], limit: int) -> str:
    written = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise Unsuitable(f"the template writes more than {limit:,} characters")
        written.append(piece)
    return "".join(written)


def _describe_error(error: BaseException) -> str:
    """Describes an error in a few words, with the line of the template if it is known."""
    if isinstance(error, MemoryError):
        return f"the template needs more than {MEMORY // 2**20} MiB of memory"
    if isinstance(error, RecursionError):
        return "the template, or what it writes, is nested too deeply"
    if isinstance(error, Unsuitable):
        return str(error)
    words = " ".join(str(error).split())[:LONGEST_ERROR] or type(error).__name__
    if isinstance(error, TemplateSyntaxError):
        return f"the template is not a Jinja template: {words} (line {error.lineno})"
    if isinstance(error, SecurityError):
        return f"the template is not safe to run: {words}"
    return f"the template says: {words}"


def _limit_time(seconds: int) -> None:
    """Limits the process to about this many more seconds of computing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    _, hardest = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hardest))


def main() -> None:
    """Answers the lines of standard input until it ends."""
    program = None
    seconds = 1
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY if hardest == resource.RLIM_INFINITY else min(MEMORY, hardest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hardest))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        try:
            request = json.loads(line)
            if program is None:
                seconds = request["seconds"]
                _limit_time(seconds)
                program = Templates(request)
                result = probe(program)
            else:
                _limit_time(seconds)
                result = answer(program, AnswerRequest(**request))
            written = json.dumps(result)
        except Exception as error:  # a template may raise anything; the next conversation may do
            fix = error.fix if isinstance(error, Unsuitable) else ""
            written = json.dumps({"error": _describe_error(error), "fix": fix})
        print(written, flush=True)
