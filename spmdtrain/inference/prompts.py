"""Turns prompts into token ids: texts, conversations, or ids."""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from spmdtrain.config.errors import ConfigError
from spmdtrain.data.chats.conversation import of_messages
from spmdtrain.data.chats.encode_conversation import Template, encode_prompt
from spmdtrain.data.chats.stops import stop_of_closing
from spmdtrain.data.chats.template_folder import template_from_spec
from spmdtrain.data.tokenizers.tokenizer import Tokenizer
from spmdtrain.inference.trained_run import OpenedRun

NOTHING = "--prompt is empty: there is nothing to continue"
SOME = '--prompt "TEXT"'


class Prompts(NamedTuple):
    """The prompts, and the form in which they were given."""

    ids: list[np.ndarray]  # int32 [time] each
    tokenizer: Tokenizer | None = None  # None: the prompts were given as ids
    is_one: bool = False  # a single prompt, not a list
    ending: "AnswerEnd | None" = None  # of conversations; only the answers are returned
    added: int = 0  # tokens before each text that are no part of it


class AnswerEnd(NamedTuple):
    """The tokens that end an answer to a conversation."""

    ids: tuple[int, ...]
    closing: str  # the template's


class Stops(NamedTuple):
    """The tokens and the strings that end a text."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]


def read_prompts(opened: OpenedRun, prompt: Any, parse_special: bool = False) -> Prompts:
    """Returns the prompts given to `generate` as ids. Raises UserError."""
    vocab = opened.setup.model.rows
    items = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if isinstance(prompt, str) or (items and all(isinstance(item, str) for item in items)):
        tokenizer = opened.tokenizer
        if not parse_special and any(map(tokenizer.spells_special, items)):
            line = "the prompt spells a special token, which is read as text"
            print(f"{line} (--parse-special, or --chat)", file=sys.stderr)
        ids = [tokenizer.encode(text, parse_special=parse_special) for text in items]
        begun = [opened.with_begin(text_ids) for text_ids in _full(ids)]
        added = len(begun[0]) - len(ids[0])
        return Prompts(begun, tokenizer, is_one=isinstance(prompt, str), added=added)
    is_one = bool(items) and all(isinstance(item, dict) for item in items)
    conversations = [items] if is_one else items
    if is_one or (items and all(map(_is_conversation, items))):
        with closing(template_of(opened)) as template:
            ids = [prompt_ids(messages, template, opened) for messages in conversations]
            return Prompts(_full(ids), opened.tokenizer, is_one, ending_of(opened, template))
    return Prompts(ids_of(prompt, vocab))


def template_of(opened: OpenedRun) -> Template:
    """Returns the template of a run. Raises ConfigError if it has none."""
    if opened.template is None:
        raise ConfigError(
            f"{opened.run} was not trained on conversations: it has no template for questions",
            fix="--prompt",
        )
    return template_from_spec(opened.template)


def prompt_ids(messages: list, template: Template, opened: OpenedRun) -> np.ndarray:
    """Returns the ids of messages and the opening of an answer. Raises UserError."""
    conversation = of_messages(messages, "the prompt")
    ids = encode_prompt(conversation, template, opened.tokenizer, "the prompt")
    # A Jinja template writes every special token itself.
    return opened.with_begin(ids) if isinstance(opened.template, str) else ids


def ending_of(opened: OpenedRun, template: Template) -> AnswerEnd:
    """Returns the tokens and the text that end an answer of a run."""
    ends = [*template.ends, opened.end_of_text]
    ids = tuple(dict.fromkeys(end for end in ends if end is not None))
    return AnswerEnd(ids, template.frame.closing)


def _is_conversation(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and isinstance(item[0], dict)


def _full(prompts: list[np.ndarray]) -> list[np.ndarray]:
    if not all(len(prompt) for prompt in prompts):
        raise ConfigError(NOTHING, fix=SOME)
    return prompts


def ids_of(ids: Any, vocab: int) -> list[np.ndarray]:
    """Returns token ids [time] or [batch, time] as rows, int32 [time] each.

    Raises ConfigError if they are not token ids, or not in the vocabulary.
    """
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise ConfigError(
            "a prompt whose rows have several lengths", fix="integer ids [time] or [batch, time]"
        ) from None
    is_ids = array.ndim in (1, 2) and np.issubdtype(array.dtype, np.integer)
    # numpy reads an empty list as floats.
    if not array.size and array.ndim in (1, 2):
        raise ConfigError(NOTHING, fix=SOME)
    if not is_ids:
        raise ConfigError(
            f"a prompt of shape {array.shape} and dtype {array.dtype}",
            fix="text, a list of messages, or integer ids [time] or [batch, time]",
        )
    outside = (array < 0) | (array >= vocab)
    if outside.any():
        raise ConfigError(
            f"a prompt with the id {array[outside].flat[0]}",
            found=f"ids from 0 to {vocab - 1} in the vocabulary",
        )
    return list(array.reshape(-1, array.shape[-1]).astype(np.int32))


def texts_to_stop(stop: Any) -> list[str]:
    """Returns the stop texts. Raises ConfigError if they are not texts."""
    is_list = isinstance(stop, list | tuple)
    texts = list(stop) if is_list else [stop]
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError("--stop is not a text", found=f"{texts!r:.60}", fix='--stop "TEXT"')
    return texts


def stops_of(prompts: Prompts, texts: Sequence[str], end: int | None) -> Stops:
    """Returns the stops of generated texts: `texts`, the id `end`, and the close of a message."""
    ids = [] if end is None else [end]
    texts = list(texts)
    if texts and prompts.tokenizer is None:
        raise ConfigError("--stop with a text needs a prompt of text", found="a prompt of ids")
    if prompts.ending is not None and prompts.tokenizer is not None:
        ids += prompts.ending.ids
        match stop_of_closing(prompts.ending.closing, prompts.tokenizer):
            case int(token):
                ids.append(token)
            case str(text):
                texts.append(text)
    return Stops(tuple(ids), tuple(texts))


def text_until_stop(prompts: Prompts, ids: np.ndarray, size: int, stops: Stops) -> str:
    """Returns the text of `ids`, whose first `size` are the prompt, up to the first stop.

    For a conversation it is the answer alone.
    """
    tokenizer = prompts.tokenizer
    assert tokenizer is not None, "only texts have an end in text"
    is_end = np.isin(ids[size:], stops.ids)
    if is_end.any():
        ids = ids[: size + int(is_end.argmax())]
    text = tokenizer.decode(ids)
    behind = len(tokenizer.decode(ids[:size]))
    places = [at for at in (text.find(stop, behind) for stop in stops.texts) if at >= 0]
    first = behind if prompts.ending else len(tokenizer.decode(ids[: prompts.added]))
    return text[first : min(places, default=len(text))]
