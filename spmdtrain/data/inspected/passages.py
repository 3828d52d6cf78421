"""Cuts the windows of a batch into passages: which tokens count in the loss, and of which document.

A passage is a row of tokens of one document that all count as targets, or all do not. The first
token of a document within a window is predicted by nothing; it belongs to the passage of the second
one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from spmdtrain.data.source import Data, MixtureData
from spmdtrain.data.tokenizers.tokenizer import from_spec

Kind = Literal["counts", "masked", "padding"]
Decode = Callable[[np.ndarray], str]
END_OF_TEXT = "\u2403"  # how the token that ends a document is shown: SYMBOL FOR END OF TEXT
SHOWN = "\n\t"  # characters that are printed unescaped, although they are not printable


@dataclass(frozen=True)
class Passage:
    """A row of tokens of one document; `document` counts from 0 in its window."""

    kind: Kind
    document: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Window:
    """One sample of a batch. `source` is its name in a mixture, else empty."""

    sample: int
    source: str
    passages: Sequence[Passage]

    def tokens_of(self, kind: Kind) -> int:
        """Returns the number of tokens in passages of this kind."""
        return sum(passage.tokens for passage in self.passages if passage.kind == kind)

    @property
    def documents(self) -> int:
        """The number of documents of which the window has tokens."""
        return len({passage.document for passage in self.passages if passage.kind != "padding"})


class _Row(NamedTuple):
    """Tokens of one document in a window: ids [n], and which of them count [n]."""

    ids: np.ndarray
    counts: np.ndarray
    is_padding: bool = False


def windows_of(data: Data, batch: Mapping[str, np.ndarray], packing: str) -> list[Window]:
    """Returns the windows of a batch from `data.train_samples`, with `data.packing` as given."""
    decode = from_spec(data.tokenizer).decode if data.tokenizer else _numbers
    names = data.names if isinstance(data, MixtureData) else ()
    windows = []
    for at, sample in enumerate(batch["sample"].tolist()):
        rows = _rows({name: values[at] for name, values in batch.items()}, packing)
        rows = [part for row in rows for part in _cut_at(row, data.end_of_text)]
        passages = [
            passage
            for number, row in enumerate(rows)
            for passage in _passages(row, number, decode, data.end_of_text)
        ]
        source = names[int(batch["source"][at])] if names else ""
        windows.append(Window(sample, source, passages))
    return windows


def _rows(window: Mapping[str, np.ndarray], packing: str) -> Iterator[_Row]:
    """Yields the rows of a window, by its segments where it has some."""
    tokens, targets = window["tokens"], window["targets"]
    segments = window.get("segment_ids", np.zeros_like(tokens))
    bounds = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(tokens)]
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        ids = np.concatenate([tokens[begin : begin + 1], targets[begin:end]])
        counts = np.concatenate([[False], window["mask"][begin:end] > 0])
        counts[0] = counts[1]
        if packing == "documents" and (end < len(tokens) or not counts[-1]):
            ids, counts = ids[:-1], counts[:-1]  # the last target begins the next document
        is_rest = packing == "best_fit" and end == len(tokens)
        is_padding = is_rest and not ids.any() and not counts.any()
        yield _Row(ids[1:], counts[1:], is_padding=True) if is_padding else _Row(ids, counts)


def _cut_at(row: _Row, end: int | None) -> Iterator[_Row]:
    """Yields the parts of a row that the token `end` separates; it belongs to the part before."""
    if end is None or row.is_padding:
        yield row
        return
    cuts = [0, *(np.flatnonzero(row.ids == end) + 1).tolist(), len(row.ids)]
    for begin, stop in zip(cuts[:-1], cuts[1:], strict=True):
        if begin < stop:
            yield _Row(row.ids[begin:stop], row.counts[begin:stop])


def _passages(row: _Row, number: int, decode: Decode, end: int | None) -> Iterator[Passage]:
    if row.is_padding:
        yield Passage("padding", number, len(row.ids), "")
        return
    bounds = [0, *(np.flatnonzero(np.diff(row.counts)) + 1).tolist(), len(row.ids)]
    for begin, stop in zip(bounds[:-1], bounds[1:], strict=True):
        ids = row.ids[begin:stop]
        is_last = end is not None and int(ids[-1]) == end
        text = harmless(decode(ids[:-1] if is_last else ids)) + END_OF_TEXT * is_last
        kind = "counts" if row.counts[begin] else "masked"
        yield Passage(kind, number, len(ids), text)


def _numbers(ids: np.ndarray) -> str:
    """Returns the ids as numbers, each followed by a space: there is no text to show."""
    return "".join(f"{token} " for token in ids.tolist())


def harmless(text: str) -> str:
    """Returns a text in which no character moves the cursor or colours of a terminal."""
    return "".join(
        letter if letter.isprintable() or letter in SHOWN else ascii(letter)[1:-1]
        for letter in text
    )
