"""Puts pairs of answers into packed windows: each pair whole in one window, its answers kept apart.

In pair i of a window the chosen answer, after its prompt, is segment 2 i and the rejected one
segment 2 i + 1. `reference` holds the log-probability that the reference model gives to an answer,
at the first token of its segment, and 0 elsewhere.
"""

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import Batch, Range
from spmdtrain.data.corpus import Corpus


def whole_pairs(corpus: Corpus, span: Range, length: int) -> Range:
    """Returns the part of a range that holds whole pairs.

    Raises DataError if there are none, or one is longer than a window of `length` positions.
    """
    bounds = np.append(corpus.document_starts, len(corpus.tokens))
    first = int(np.searchsorted(bounds, span.start))
    last = int(np.searchsorted(bounds, span.stop, side="right")) - 1
    if last <= first:
        raise DataError(f"no pair is whole among {span.size} tokens", fix="more pairs")
    positions = np.diff(bounds[first : last + 1]) - 1
    longest = int(positions.max())
    if longest > length:
        raise DataError(
            f"pair {first + int(positions.argmax()) + 1} has {longest + 1} tokens, more than fit "
            "into a sequence",
            asked=f"train.sequence_length={length}",
            fix=f"--set train.sequence_length={longest}, or data without it",
        )
    return Range(int(bounds[first]), int(bounds[last]))


def fill_pair(
    batch: Batch, row: int, at: int, number: int, corpus: Corpus, start: int, size: int
) -> None:
    """Marks the two answers of pair `number` of a row.

    The pair begins at the position `at`, its first token has the offset `start` in the corpus, and
    it has `size` positions.
    """
    halves = corpus.halves(start, start + size + 1)
    place = slice(at, at + size)
    begin = int(halves.argmax())  # of the second
    if begin == 0 or (np.diff(halves) < 0).any():
        raise DataError(
            f"the pair at token offset {start} does not have two answers: its marks are damaged"
        )
    batch["segment_ids"][row, place] = 2 * number + halves[:-1]
    batch["positions"][row, place] = np.arange(size) - begin * halves[:-1]
    batch["mask"][row, place] *= halves[1:] == halves[:-1]
    if corpus.references is not None:
        pair = int(np.searchsorted(corpus.document_starts, start))
        batch["reference"][row, [at, at + begin]] = corpus.references[pair]
