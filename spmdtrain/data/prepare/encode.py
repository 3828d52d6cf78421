"""Turns chunks of documents into tokens, on one core or in several processes.

The output does not depend on the number of processes or on how documents were cut into chunks: each
document is encoded on its own, and chunks come out in the order they went in.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.chats.conversation import ChatFields, Conversation, read_conversation, read_pair
from spmdtrain.data.chats.encode_conversation import (
    EncodedConversation,
    Template,
    encode_conversation,
)
from spmdtrain.data.chats.faults import markers_of_text
from spmdtrain.data.chats.template_folder import template_from_spec
from spmdtrain.data.prepare.notes import (
    HAS_GAPS,
    HOLDS_END,
    NEVER_ENDS,
    QUOTES,
    REPEATS,
    SPELLS,
)
from spmdtrain.data.texts.documents import Chunk, format_of, texts_of, values_of
from spmdtrain.data.token_files.tokens import DTYPES, SECOND, storage_dtype
from spmdtrain.data.tokenizers.tokenizer import Tokenizer, from_spec

WAITING = 2  # chunks per process handed out ahead of the one being written


@dataclass(frozen=True)
class Recipe:
    """The settings that turn documents into tokens; picklable for other processes."""

    tokenizer: dict  # its spec
    end_of_text: int | None  # the id after each document
    field: str | ChatFields  # read from tables and JSON lines; of texts, or of conversations
    template: str | dict | None = None  # the spec of a template, if documents are conversations
    parse_special: bool = False  # special tokens spelled in a text are tokens
    last_answer_only: bool = False  # of a conversation
    today: str | None = None  # the date that a template may write
    begin_of_text: int | None = None  # the id before each document


class Encoded(NamedTuple):
    """The tokens of some documents, concatenated."""

    ids: np.ndarray  # [tokens] uint16 or uint32
    lengths: np.ndarray  # [documents] int64, tokens of each; 0: it was empty
    text_bytes: np.ndarray  # [documents] int64, of UTF-8
    loss: np.ndarray | None  # [tokens] uint8, as in a .loss; None: all count
    notes: np.ndarray | None = None  # [documents] uint8, of SPELLS etc.

    def cut(self, documents: int) -> tuple["Encoded", "Encoded"]:
        """Returns the first `documents` documents and the rest."""
        tokens = int(self.lengths[:documents].sum())
        first_loss = None if self.loss is None else self.loss[:tokens]
        other_loss = None if self.loss is None else self.loss[tokens:]
        first = Encoded(
            self.ids[:tokens],
            self.lengths[:documents],
            self.text_bytes[:documents],
            first_loss,
            None if self.notes is None else self.notes[:documents],
        )
        others = Encoded(
            self.ids[tokens:],
            self.lengths[documents:],
            self.text_bytes[documents:],
            other_loss,
            None if self.notes is None else self.notes[documents:],
        )
        return first, others


@contextmanager
def encoder(recipe: Recipe) -> Iterator[Callable[[Chunk], Encoded]]:
    """Yields the function that encodes a chunk in this process."""
    tokenizer = from_spec(recipe.tokenizer)
    if recipe.template is None:
        yield lambda chunk: _encode_texts(chunk, recipe, tokenizer)
        return
    with closing(template_from_spec(recipe.template, recipe.today)) as template:
        yield lambda chunk: _encode_conversations(chunk, recipe, template, tokenizer)


def _encode_texts(chunk: Chunk, recipe: Recipe, tokenizer: Tokenizer) -> Encoded:
    assert isinstance(recipe.field, str), "texts have one field"
    sized = list(texts_of(chunk, recipe.field))
    texts = [text for text, _ in sized]
    sizes = [size for _, size in sized]
    encoded = tokenizer.encode_batch(texts, parse_special=recipe.parse_special)
    notes = [SPELLS * tokenizer.spells_special(text) for text in texts]
    return _joined(encoded, sizes, None, notes, recipe, tokenizer)


def _encode_conversations(
    chunk: Chunk, recipe: Recipe, template: Template, tokenizer: Tokenizer
) -> Encoded:
    assert isinstance(recipe.field, ChatFields), "conversations have their own fields"
    encoded = []
    notes = []
    spelled_as_text = markers_of_text(template, tokenizer)

    def encode(conversation: Conversation, where: str) -> EncodedConversation:
        if recipe.last_answer_only:
            conversation = conversation.with_last_answer_only()
        encoding = encode_conversation(
            conversation,
            template,
            tokenizer,
            where,
            parse_special=recipe.parse_special,
            is_ended=recipe.end_of_text is not None,
        )
        if not encoding.loss.any():
            raise _unlearned(conversation, where)
        return encoding

    nothing = EncodedConversation(np.zeros(0, np.int32), np.zeros(0, np.uint8), 0)
    for number, value in enumerate(values_of(chunk, recipe.field), chunk.first):
        where = row_name(chunk, number)
        if recipe.field.pairs:
            conversations = read_pair(value, where) or ()
        else:
            only = read_conversation(value, recipe.field, where)
            conversations = () if only is None else (only,)
        answers = [encode(conversation, where) for conversation in conversations]
        if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
            raise DataError(
                f"{where}: the chosen answer is the rejected one, so neither is preferred",
                fix="data without this row",
            )
        encoded.append(_as_document(answers, recipe) if answers else nothing)
        spells = any(
            _spells(conversation, spelled_as_text, tokenizer) for conversation in conversations
        )
        repeats = any(conversation.repeats for conversation in conversations)
        notes.append(SPELLS * spells + REPEATS * repeats + _notes_of(answers))
    ids = [document.ids for document in encoded]
    losses = [document.loss for document in encoded]
    sizes = [document.text_bytes for document in encoded]
    return _joined(ids, sizes, losses, notes, recipe, tokenizer)


def _as_document(encoded: list[EncodedConversation], recipe: Recipe) -> EncodedConversation:
    """Returns a conversation, or both of a pair, as one document.

    The marks of the second have SECOND added. The first ends with the end of text, and the second
    begins with the begin of text, as `_joined` ends and begins every document.
    """
    if len(encoded) == 1:
        return encoded[0]
    first, second = encoded
    if recipe.end_of_text is not None:
        ids, loss = np.append(first.ids, recipe.end_of_text), np.append(first.loss, first.loss[-1])
        first = first._replace(ids=ids.astype(np.int32), loss=loss)
    if recipe.begin_of_text is not None:
        ids, loss = np.insert(second.ids, 0, recipe.begin_of_text), np.insert(second.loss, 0, 0)
        second = second._replace(ids=ids, loss=loss)
    return EncodedConversation(
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.loss, second.loss + np.uint8(SECOND)]),
        first.text_bytes + second.text_bytes,
    )


def _notes_of(encoded: list[EncodedConversation]) -> int:
    """Returns the notes on a document that are due to how its template writes conversations."""
    return (
        HAS_GAPS * any(conversation.has_gaps for conversation in encoded)
        + NEVER_ENDS * any(conversation.never_ends for conversation in encoded)
        + QUOTES * any(conversation.quotes_arguments for conversation in encoded)
    )


def row_name(chunk: Chunk, number: int) -> str:
    """Returns the name of a row in messages: the number of its line or row."""
    kind = "line" if format_of(chunk.path) == "jsonl" else "row"
    return f"{chunk.path}, {kind} {number + 1}"


def _unlearned(conversation: Conversation, where: str) -> DataError:
    roles = dict.fromkeys(message["role"] for message in conversation.messages)
    return DataError(
        f"{where}: no token of it is learned",
        found=f"messages of {', '.join(roles)}",
        fix="a message of the role assistant, with no weight of 0",
    )


def _spells(conversation: Conversation, markers: list[str], tokenizer: Tokenizer) -> bool:
    """Returns True if a message spells out a special token, or a marker of the template."""
    return any(
        tokenizer.spells_special(text) or any(marker in text for marker in markers)
        for text in conversation.texts
    )


def _joined(
    encoded: list[np.ndarray],
    sizes: list[int],
    losses: list[np.ndarray] | None,
    noted: list[int],
    recipe: Recipe,
    tokenizer: Tokenizer,
) -> Encoded:
    """Concatenates documents, each with its begin and its end of text; empty ones get neither."""
    dtype = DTYPES[storage_dtype(tokenizer.size)]
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    notes = np.array(noted, np.uint8)
    if recipe.end_of_text is not None:
        is_pair = isinstance(recipe.field, ChatFields) and recipe.field.pairs
        held = [np.count_nonzero(ids == recipe.end_of_text) for ids in encoded]
        # The first answer of a pair is ended by us, too.
        notes += HOLDS_END * (np.array(held) > is_pair).astype(np.uint8)
    ids = np.concatenate([*encoded, np.zeros(0, np.int32)])
    in_range = not len(ids) or (ids.min() >= 0 and ids.max() < tokenizer.size)
    assert in_range, "a tokenizer gave an id beyond its size"
    loss = None if losses is None else np.concatenate([*losses, np.zeros(0, np.uint8)])
    if recipe.end_of_text is not None:
        ends = np.cumsum(lengths)[lengths > 0]
        ids = np.insert(ids, ends, recipe.end_of_text)
        if loss is not None:  # learning the last token means learning to stop
            loss = np.insert(loss, ends, loss[ends - 1])
        lengths = lengths + (lengths > 0)
    if recipe.begin_of_text is not None:
        begins = (np.cumsum(lengths) - lengths)[lengths > 0]
        ids = np.insert(ids, begins, recipe.begin_of_text)
        if loss is not None:
            loss = np.insert(loss, begins, 0)
        lengths = lengths + (lengths > 0)
    return Encoded(ids.astype(dtype), lengths, np.array(sizes, np.int64), loss, notes)


def encode_all(
    recipe: Recipe, chunks: Iterable[Chunk], workers: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Yields chunks and their tokens, in order, encoded by `workers` processes.

    With one worker, this process encodes, and the package `tokenizers` starts its own threads.
    Raises DataError if a chunk cannot be encoded or a process is lost.
    """
    if workers == 1:
        with encoder(recipe) as encode:
            for chunk in chunks:
                yield chunk, encode(chunk)
        return
    # A forked process would inherit locks held by any running threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(recipe,))
    try:
        waiting: deque[tuple[Chunk, Future]] = deque()
        for chunk in chunks:
            waiting.append((chunk, _submit(pool, chunk)))
            if len(waiting) > WAITING * workers:
                yield _finished(waiting)
        while waiting:
            yield _finished(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunk: Chunk) -> Future:
    """Hands a chunk to a worker. A worker started for it ignores Ctrl-C from the beginning."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a child inherits it
    try:
        return pool.submit(_encode, chunk)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _finished(waiting: deque[tuple[Chunk, Future]]) -> tuple[Chunk, Encoded]:
    chunk, future = waiting.popleft()
    try:
        return chunk, future.result()
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing process has died, perhaps for lack of memory",
            fix="fewer --workers, and the same command again: finished shards are kept",
        ) from None


# The encoder of a worker, made once at process start.
_encode_here: Callable[[Chunk], Encoded] | None = None
_held = ExitStack()  # what it needs until the process ends


def _start(recipe: Recipe) -> None:
    """Prepares a worker process, which ends with its parent."""
    global _encode_here
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A worker should fill one core: otherwise the package would start a thread on each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode_here = _held.enter_context(encoder(recipe))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by a process"
    parent.join()
    os._exit(1)


def _encode(chunk: Chunk) -> Encoded:
    assert _encode_here is not None, "a worker starts with _start"
    return _encode_here(chunk)
