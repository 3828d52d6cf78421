"""Check what a caller asks readers for: sample indices, and ranges of tokens."""

import numpy as np

from spmdtrain.config.errors import DataError

LAST_SAMPLE = 2**62  # that a run begins at: those after it fit into 64 bits


def sample_indices(indices: object) -> np.ndarray:
    """Return sample indices as int64 [n]. Raises DataError where they are none."""
    found = np.asarray(indices)
    if np.issubdtype(found.dtype, np.floating) and (found % 1 == 0).all() and (found < 2**53).all():
        found = found.astype(np.int64)  # whole numbers, each exact
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise DataError(
            "sample indices are a row of integers", found=f"{found.dtype}{list(found.shape)}"
        )
    if found.size and (found.min() < 0 or found.max() >= 2**63):
        outside = found[(found < 0) | (found >= 2**63)][0]
        raise DataError("a sample index is from 0 to 2**63 - 1", found=str(outside))
    return found.astype(np.int64)


def check_range(start: int, stop: int, tokens: int, sequence_length: int) -> None:
    """Raise DataError where a range is none of a corpus of so many tokens, or windows have none."""
    if not 0 <= start <= stop <= tokens:
        raise DataError(
            f"the tokens {start} to {stop} are no range of the corpus", found=f"{tokens} tokens"
        )
    if sequence_length < 1:
        raise DataError("a window has at least one token", found=f"{sequence_length}")
