"""Checks, before a run begins, that a split has a token that counts in the loss."""

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.batches import Range
from spmdtrain.data.corpus import Corpus

READ_AT_ONCE = 2**22  # tokens


def has_target(corpus: Corpus, span: Range, packing: str) -> bool:
    """Returns True if a token of a range counts as a target.

    The first token of the range does not, nor, if documents are kept apart, does the first of each
    document. Marks are read up to the first that counts.
    """
    begin = span.start + 1
    if corpus.loss is None:
        starts = _starts_between(corpus, begin, span.stop) if packing != "stream" else []
        return begin < span.stop and len(starts) < span.stop - begin
    for start in range(begin, span.stop, READ_AT_ONCE):
        stop = min(start + READ_AT_ONCE, span.stop)
        counts = corpus.counts(start, stop)
        if packing != "stream":
            counts[_starts_between(corpus, start, stop) - start] = 0
        if counts.any():
            return True
    return False


def check_targets(
    corpus: Corpus, span: Range, packing: str, *, name: str, source: str = ""
) -> None:
    """Raises DataError if no token of a split counts in the loss.

    `name` is "training" or "validation", `source` the name of the corpus in a mixture.
    """
    if has_target(corpus, span, packing):
        return
    whose = f" of {source}" if source else ""
    marked = corpus.loss is None or has_target(corpus, span, "stream")
    if marked and packing != "stream":
        marks = "marks on nothing but the first tokens of documents"
        if corpus.loss is None:
            marks = "no document with two tokens"
        fix = "--set data.packing=stream"
    else:
        marks = f"{span.size} tokens, of which its .loss marks none"
        fix = "other files, or another data.validation_fraction"
    raise DataError(
        f"the {name} split{whose} has no token that counts in the loss", found=marks, fix=fix
    )


def _starts_between(corpus: Corpus, start: int, stop: int) -> np.ndarray:
    """Returns the offsets from start to stop - 1 at which documents start."""
    first, last = np.searchsorted(corpus.document_starts, [start, stop])
    return corpus.document_starts[first:last]
