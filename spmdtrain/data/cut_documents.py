"""Counts the documents that windows cut, in each way of packing."""

import numpy as np

from spmdtrain.data.batches import Range


def count_cut(
    document_starts: np.ndarray, span: Range, length: int, packing: str
) -> tuple[int, int]:
    """Returns how many documents of a range are cut, and how many there are.

    Windows have `length` positions. With "best_fit" only longer documents are cut; otherwise
    windows follow each other, and cut the documents that lie across their bounds.
    """
    first = np.searchsorted(document_starts, span.start, side="right") - 1
    last = np.searchsorted(document_starts, span.stop)
    begins = np.maximum(document_starts[first:last], span.start)
    positions = np.append(begins[1:], span.stop) - begins - 1
    begins, positions = begins[positions > 0], positions[positions > 0]
    if packing == "best_fit":
        is_cut = positions > length
    else:
        from_first = begins - span.start
        is_cut = from_first // length != (from_first + positions - 1) // length
    return int(np.count_nonzero(is_cut)), len(begins)


def cut_note(cut: int, documents: int, packing: str) -> str:
    """Returns a note about conversations that are cut."""
    noun = "conversation is" if documents == 1 else "conversations are"
    fix = "a longer train.sequence_length or shorter data"
    if packing != "best_fit":
        fix = "data.packing=best_fit"
    return f"{cut:,} of {documents:,} {noun} cut at a window ({fix} keeps them whole)"
