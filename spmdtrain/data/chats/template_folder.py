"""Finds the template that is published with a tokenizer, and opens templates of either kind.

`chat_template.jinja`, with others in `additional_chat_templates`, takes precedence over
`chat_template` in `tokenizer_config.json`, which is a text or a list of named ones. Of these
`default` is used, and `tool_use` for conversations with tools.
"""

import os
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import DataError
from spmdtrain.config.named_file import read_named
from spmdtrain.data.chats.encode_conversation import Template
from spmdtrain.data.chats.jinja_template import ANOTHER, JinjaTemplate, JinjaText
from spmdtrain.data.chats.simple_template import SimpleTemplate
from spmdtrain.data.tokenizers.tokenizer import Tokenizer
from spmdtrain.data.tokenizers.tokenizer_folder import ends_named, named_tokens, read_config

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
CONFIG = "tokenizer_config.json"
LARGEST = 2**20  # bytes of a template


def folder_template(folder: Path, variables: dict[str, Any]) -> JinjaText | None:
    """Returns the template that is published in a folder; None if there is none.

    Raises DataError if the folder's files are damaged, or name several templates and no default.
    """
    texts = _texts_of(folder)
    if not texts:
        return None
    if "default" not in texts:
        raise DataError(
            f"{folder / CONFIG} has several templates and none of them is the default",
            found=", ".join(texts),
            fix=ANOTHER,
        )
    return JinjaText(texts["default"], texts.get("tool_use"), variables=variables)


def file_template(path: str, variables: dict[str, Any]) -> JinjaText:
    """Returns the template in a file. Raises DataError if it cannot be read."""
    return JinjaText(_read(Path(os.path.expanduser(path))), variables=variables)


def template_from_spec(spec: str | dict[str, Any], today: str | None = None) -> Template:
    """Returns the template that `spec` described. Raises DataError if it is damaged."""
    if isinstance(spec, str):
        return SimpleTemplate.parse(spec)
    return JinjaTemplate(jinja_text(spec), today)


def jinja_text(spec: dict[str, Any]) -> JinjaText:
    """Returns the template that `JinjaText.spec` described. Raises DataError if it is damaged."""
    match spec:
        case {
            "jinja": str(text),
            "for_tools": str() | None as for_tools,
            "tokens": dict(tokens),
            "variables": dict(variables),
            "ends": list(ends),
            **others,
        } if all(type(end) is int for end in ends) and all(
            isinstance(token, str) for token in tokens.values()
        ):
            # Older versions always read arguments as JSON, and so do their files and runs.
            parses = others.get("parses_arguments", True)
            return JinjaText(text, for_tools, tokens, variables, tuple(ends), parses)
    raise DataError(f"not a template that this version knows: {spec!r:.80}")


def with_tokens(text: JinjaText, folder: Path, tokenizer: Tokenizer) -> JinjaText:
    """Returns a template with the special tokens and ends that the files of a folder name.

    Raises DataError if one of the files is damaged.
    """
    named = ends_named(folder)
    ids = [tokenizer.id_of(end) if isinstance(end, str) else end for end in named]
    ends = tuple(dict.fromkeys(end for end in ids if end is not None and end < tokenizer.size))
    return text._replace(tokens=named_tokens(folder), ends=ends)


def fault_of(text: JinjaText) -> DataError | None:
    """Returns why a template cannot write a conversation; None if it can."""
    with JinjaTemplate(text) as template:
        try:
            _ = template.frame
        except DataError as error:
            return error
    return None


def _texts_of(folder: Path) -> dict[str, str]:
    """Returns the templates of a folder by their names."""
    if (folder / TEMPLATE).is_file():
        others = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
        return {path.stem: _read(path) for path in others} | {"default": _read(folder / TEMPLATE)}
    value = read_config(folder / CONFIG).get("chat_template") if folder.is_dir() else None
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        texts = {named["name"]: named["template"] for named in value}
        is_sound = all(isinstance(text, str) for pair in texts.items() for text in pair)
    except (TypeError, KeyError):
        texts, is_sound = {}, False
    if not is_sound:
        raise DataError(
            f"{folder / CONFIG} has a chat_template that is not one",
            found=f"{value!r:.60}",
            fix=ANOTHER,
        )
    if len(texts) == 1:
        return {"default": next(iter(texts.values()))}
    return texts


def _read(path: Path) -> str:
    try:
        return read_named(path, LARGEST).decode()
    except OSError as error:
        what = f"cannot read the template {path}: {error.strerror or error}"
        raise DataError(what, fix=ANOTHER) from None
    except UnicodeDecodeError:
        what = f"the template {path} is not UTF-8 text"
        raise DataError(what, fix=ANOTHER) from None
