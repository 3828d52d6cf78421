"""Reads the requests of lm-evaluation-harness: which tokens are scored after which, and how a text
is generated.

Every edge case is as in the harness's own models (`TemplateLM`, `HFLM`). What these assert is
refused here: a continuation without tokens would score like a certain one.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import DataError
from spmdtrain.inference.sample import Choice
from spmdtrain.inference.trained_run import OpenedRun

NEW_TOKENS = 256  # of a generated text, if the task does not say
# The names by which tasks set the number of new tokens; the first that is present counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
GENERATION = (*LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p")
# Options that change nothing here: one text is generated, token by token.
NO_EFFECT = {"num_beams": 1, "use_cache": True}

Ids = np.ndarray
Pair = tuple[Ids, Ids]  # (context, continuation), both of at least one token


def scored_pair(opened: OpenedRun, context: str, continuation: str) -> Pair:
    """Encodes a context and the continuation that is scored after it.

    The whole text is encoded at once, and its ids are split after those of the context. Spaces at
    the end of the context belong to the continuation. An empty context is the token before a text.
    Raises DataError if the continuation has no token of its own, or more than the model sees.
    """
    encode = opened.tokenizer.encode
    before_spaces = context.rstrip()
    whole = encode(context + continuation)
    if before_spaces:
        whole = opened.with_begin(whole)
        before = opened.with_begin(encode(before_spaces))
        pair = before, whole[len(before) :]
    else:
        pair = _after_prefix(opened, whole)
    _check_scored(opened, pair[1], context, continuation)
    return pair


def rolling_pairs(opened: OpenedRun, text: str) -> list[Pair]:
    """Returns the pairs whose scores add up to that of a whole text."""
    first = int(token_before_text(opened)[-1])
    return rolling_windows(opened.tokenizer.encode(text), first, opened.config.model.max_length)


def rolling_windows(ids: Ids, first: int, limit: int) -> list[Pair]:
    """Returns (context, continuation) pairs whose continuations concatenate to `ids`.

    They are those of the harness (`get_rolling_token_windows`, `make_disjoint_window`): each window
    scores `limit` tokens given the previous one, which is `first` at the start. The last, shorter
    window has as many tokens of context as fit.
    """
    row = np.concatenate([[first], ids]).astype(np.int32)  # ids[at] is row[at + 1]
    windows = []
    for at in range(0, len(ids), limit):
        end = min(at + limit, len(ids))
        start = max(end - limit, 0)
        windows.append((row[start : at + 1], row[at + 1 : end + 1]))
    return windows


@dataclass(frozen=True)
class TextRequest:
    """A text to generate: after `context`, up to `length` tokens or the first of `until`."""

    context: Ids
    length: int
    choice: Choice
    until: tuple[str, ...]

    def cut(self, text: str) -> str:
        """Returns a generated text up to the first of `until`."""
        places = [text.find(stop) for stop in self.until if stop]
        return text[: min((place for place in places if place >= 0), default=len(text))]


def generation(opened: OpenedRun, context: str, options: dict[str, Any]) -> TextRequest:
    """Reads how a task wants a text generated.

    Of a long context the model sees the last tokens, as many as leave room for the text. Raises
    DataError if no token of the context fits, or for an option that we do not support.
    """
    unknown = [
        f"{name}={shown(value)}"
        for name, value in options.items()
        if name not in GENERATION and NO_EFFECT.get(name) != value
    ]
    if unknown:
        raise DataError(
            f"a task generates with {', '.join(unknown)}, which a run has no such way for",
            fix=f"a task whose generation_kwargs are of {', '.join(GENERATION)}",
        )
    lengths = (options[name] for name in LENGTHS if options.get(name) is not None)
    length = int(next(lengths, NEW_TOKENS))
    longest = opened.config.model.max_length
    if length >= longest:
        raise DataError(
            f"a task generates {length} tokens, which leave no room for its question",
            found=f"a model of {longest} tokens",
            fix=f"a task whose generation_kwargs have a max_gen_toks below {longest}",
        )
    encoded = opened.tokenizer.encode(context)
    ids = opened.with_begin(encoded) if context else token_before_text(opened)
    until = options.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    return TextRequest(ids[length - longest :], length, _choice(options), stops)


def token_before_text(opened: OpenedRun) -> Ids:
    """Returns the token that precedes a text: the one that begins it, the end of another text, or
    else a line break.
    """
    for token in (opened.begin_of_text, opened.end_of_text):
        if token is not None:
            return np.array([token], np.int32)
    return opened.tokenizer.encode("\n")


def _after_prefix(opened: OpenedRun, ids: Ids) -> Pair:
    """Returns ids after the token before a text, which may be their own first token."""
    prefix = token_before_text(opened)
    marks = (opened.begin_of_text, opened.end_of_text)
    if len(ids) and ids[0] == prefix[-1] and ids[0] in marks:
        return ids[:1], ids[1:]
    return prefix, ids


def _check_scored(opened: OpenedRun, scored: Ids, context: str, continuation: str) -> None:
    longest = opened.config.model.max_length
    if not len(scored):
        raise DataError(
            "a choice of a task has no token of its own, so nothing of it can be scored",
            found=f"{shown(continuation)} after {shown(context[-40:])}",
            fix="choices that begin in a new word: a tokenizer may merge others into the question",
        )
    if len(scored) > longest:
        raise DataError(
            f"a choice of a task has {len(scored)} tokens, more than the model sees",
            found=f"a model of {longest} tokens, and a choice that begins {shown(continuation)}",
            fix="a task with shorter choices, or a model with a larger model.max_length",
        )


def _choice(options: dict[str, Any]) -> Choice:
    """Returns how the next token is chosen: the likeliest, unless the task asks for a sample."""
    temperature = float(options.get("temperature") or 0.0)
    samples = options.get("do_sample")
    if samples is None:
        samples = temperature > 0
    if not samples:
        return Choice(temperature=0)
    return Choice(temperature, options.get("top_k"), options.get("top_p"))
