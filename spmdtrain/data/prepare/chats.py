"""Chooses the template of `data prepare --chat`, and reads the texts of conversations."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spmdtrain.config.errors import ConfigError
from spmdtrain.data.chats.conversation import ChatFields, read_conversation, read_pair
from spmdtrain.data.chats.jinja_template import JinjaText
from spmdtrain.data.chats.simple_template import CHATML, SimpleTemplate
from spmdtrain.data.chats.template_folder import file_template, folder_template
from spmdtrain.data.prepare.encode import row_name
from spmdtrain.data.texts.documents import read_chunks, values_of
from spmdtrain.data.tokenizers.tokenizer import has_file
from spmdtrain.data.tokenizers.tokenizer_folder import tokenizer_file


class ChosenTemplate(NamedTuple):
    """A template and where it comes from."""

    template: SimpleTemplate | JinjaText
    origin: str
    folder: Path | None  # of the tokenizer, whose files name special tokens; None: it has none


def choose_template(
    simple: str | None, file: str | None, tokenizer: str, variables: Iterable[str]
) -> ChosenTemplate:
    """Returns the template of a job: the named one, that of the tokenizer's folder, or ChatML.

    `variables` are NAME=VALUE, where a value is JSON or text. Raises UserError if it cannot be
    read.
    """
    if simple and file:
        raise ConfigError("--template and --chat-template cannot go together", fix="one of them")
    set_by_user = dict(map(_variable, variables))
    folder = tokenizer_file(tokenizer).parent if has_file(tokenizer) else None
    if file:
        return ChosenTemplate(file_template(file, set_by_user), file, folder)
    published = folder_template(folder, set_by_user) if folder and not simple else None
    if published:
        return ChosenTemplate(published, str(folder), folder)
    if set_by_user:
        raise ConfigError("--chat-set is for Jinja templates", fix="--chat-template FILE")
    return ChosenTemplate(SimpleTemplate.parse(simple or CHATML), simple or "ChatML", folder)


def _variable(text: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE."""
    name, is_there, value = text.partition("=")
    if not is_there or not name.isidentifier():
        raise ConfigError(f"--chat-set {text!r:.80} is not NAME=VALUE", fix="enable_thinking=false")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def texts_of_chats(files: Iterable[str], fields: ChatFields) -> Iterator[str]:
    """Yields every text in conversations. Raises DataError if a row holds none."""
    for file in files:
        for chunk in read_chunks(file, fields):
            for number, value in enumerate(values_of(chunk, fields), chunk.first):
                where = row_name(chunk, number)
                if fields.pairs:
                    conversations = read_pair(value, where) or ()
                else:
                    conversations = [read_conversation(value, fields, where)]
                for conversation in conversations:
                    yield from conversation.texts if conversation else ()
