"""Chooses the windows that a teacher reads, and the tokens of each that are saved.

A student without shuffling, or with packing="best_fit", reads the same windows in each epoch: the
teacher reads those. Any other student cuts its windows elsewhere in each epoch. Then the teacher
reads every token twice, in windows that overlap by a half, and its prediction with the longer
context is saved: except for the first tokens, that is at least half a window.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from spmdtrain.config.schema import RunConfig
from spmdtrain.data.batches import EvalWindows, Range
from spmdtrain.data.corpus import Corpus
from spmdtrain.data.packing import PackedWindows


class SavedInputs(NamedTuple):
    """The inputs of a window that are saved, which are neighbours."""

    place: int  # of the first in the window
    start: int  # its offset in the corpus
    size: int


class Pass(NamedTuple):
    """Windows that the teacher reads one after another."""

    windows: EvalWindows | PackedWindows
    saved: Callable[[int], list[SavedInputs]]  # of a window, by its number


def passes(corpus: Corpus, span: Range, config: RunConfig) -> Iterator[Pass]:
    """Yields one or two passes over a range of tokens, which save each of its inputs once."""
    length, packing = config.train.sequence_length, config.data.packing
    if packing == "best_fit":
        yield _packed(PackedWindows(corpus, span, length))
        return
    half = length // 2
    if not config.data.shuffle or not half:
        yield _in_order(corpus, span, length, packing, lambda _: 0)
        return
    yield _in_order(corpus, span, length, packing, lambda window: half if window else 0)
    later = Range(span.start + half, span.stop)
    yield _in_order(corpus, later, length, packing, lambda _: length - half)


def _packed(windows: PackedWindows) -> Pass:
    def saved(window: int) -> list[SavedInputs]:
        place, inputs = 0, []
        for start, size in windows.pieces(window):
            inputs.append(SavedInputs(place, start, size))
            place += size
        return inputs

    return Pass(windows, saved)


def _in_order(
    corpus: Corpus, span: Range, length: int, packing: str, skipped: Callable[[int], int]
) -> Pass:
    """Returns a pass over windows of which the first `skipped(number)` inputs are not saved."""

    def saved(window: int) -> list[SavedInputs]:
        place = skipped(window)
        begin = span.start + window * length
        stop = min(begin + length, span.stop - 1)  # the last token is no input
        size = stop - begin - place
        return [SavedInputs(place, begin + place, size)] if size > 0 else []

    return Pass(EvalWindows(corpus, span, length, packing=packing), saved)
