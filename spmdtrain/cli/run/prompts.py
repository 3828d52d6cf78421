"""Reads the prompts of `sample`: a typed prompt, a question, or a file of either."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdtrain.config import ConfigError
from spmdtrain.config.named_file import read_named
from spmdtrain.data.chats.json_texts import are_messages, messages_of, refuse_messages

# In place of the text of --chat: a conversation whose questions are lines of standard input.
TALK = object()
MARK = "> "  # the prompt on a terminal, before a question is typed
LINE_OF_JSON = '{"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'
LINES_OF_JSON = (".jsonl", ".ndjson")
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates: not text

Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation


def read_prompts(parsed: argparse.Namespace) -> list[Prompt]:
    """Returns the prompts. Raises ConfigError if there are none, or for exclusive options."""
    check_alone(parsed)
    if parsed.chat is not None:
        return [[{"role": "user", "content": parsed.chat}]]
    if parsed.prompts is None:
        return ["\n" if parsed.prompt is None else parsed.prompt]
    return _of_file(parsed.prompts)


def check_alone(parsed: argparse.Namespace) -> None:
    """Raises ConfigError if options that exclude each other are given."""
    typed = [name for name in ("prompt", "prompts", "chat") if getattr(parsed, name) is not None]
    if len(typed) > 1:
        raise ConfigError(f"--{typed[0]} and --{typed[1]} cannot go together", fix="one of them")


def questions() -> Iterator[str]:
    """Yields the lines of standard input until it ends; empty ones are left out."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print(MARK, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise ConfigError("a question is not UTF-8 text") from None
        if not line:
            break
        if line.strip():
            yield line.rstrip("\n")
    if is_terminal:
        print(file=sys.stderr)


def as_json(prompt: Prompt, text: str) -> str:
    """Returns the line of JSON with a prompt and the generated text."""
    question = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    return json.dumps(question | {"text": text})


def _of_file(name: str) -> list[Prompt]:
    """Returns the prompts of a file, one per line, without empty lines."""
    path = Path(name)
    try:
        content = read_named(path).decode("utf-8-sig")  # with Windows' byte order mark
    except OSError as error:
        what = f"--prompts {path} cannot be read: {error.strerror}"
        raise ConfigError(what, fix="a file with one prompt per line") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts {path} is not UTF-8 text") from None
    if path.suffix.lower() in LINES_OF_JSON:
        # Only a line break ends a line of JSON; a text may contain other separators.
        lines = enumerate(content.split("\n"), 1)
        prompts: list[Prompt] = [
            _of_line(line, f"{path}:{number}") for number, line in lines if line.strip()
        ]
    else:
        prompts = list(filter(str.strip, content.splitlines()))
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt", fix="one prompt per line")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ConfigError(f"--prompts {path} holds texts and messages", fix="a file for each")
    return prompts


def _of_line(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
        written = json.dumps(row, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--prompts {where} is not a line of JSON: {error}", fix=LINE_OF_JSON
        ) from None
    if HALF_A_PAIR.search(written):
        raise ConfigError(f"--prompts {where} has half a surrogate pair", found=f"{line:.60}")
    prompt = _prompt_of(row, where)
    is_text = isinstance(prompt, str) and prompt
    if is_text or (are_messages(prompt) and all(isinstance(message, dict) for message in prompt)):
        return prompt
    raise ConfigError(
        f"--prompts {where} is not a prompt",
        found=f"{line:.60}",
        fix=LINE_OF_JSON,
    )


def _prompt_of(row: Any, where: str) -> Any:
    """Returns what a line of JSON asks. Raises ConfigError if messages are in a text of their own
    JSON where a text can be.
    """
    if isinstance(row, dict) and "prompt" not in row:
        messages = messages_of(row.get("messages"))
        return None if isinstance(messages, str) else messages
    prompt = row["prompt"] if isinstance(row, dict) else row
    if isinstance(prompt, str):
        refuse_messages(prompt, f"--prompts {where}")
    return prompt
