"""Checks the arguments of readers: sample indices and ranges of tokens."""

import numpy as np

from spmdtrain.config.errors import DataError

LAST_SAMPLE = 2**62  # that a run may begin at: later ones still fit into 64 bits


def sample_indices(indices: object) -> np.ndarray:
    """Returns sample indices as int64 [n]. Raises DataError if they are not valid indices."""
    numbers = np.asarray(indices)
    if np.issubdtype(numbers.dtype, np.floating):
        is_whole = (numbers % 1 == 0) & (numbers < 2**53)  # then each is exact
        numbers = numbers.astype(np.int64) if is_whole.all() else numbers
    if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        raise DataError(
            "sample indices are a row of integers", found=f"{numbers.dtype}{list(numbers.shape)}"
        )
    if numbers.size and (numbers.min() < 0 or numbers.max() >= 2**63):
        outside = numbers[(numbers < 0) | (numbers >= 2**63)][0]
        raise DataError("a sample index is from 0 to 2**63 - 1", found=str(outside))
    return numbers.astype(np.int64)


def check_range(start: int, stop: int, tokens: int, sequence_length: int) -> None:
    """Raises DataError if a range exceeds the corpus of `tokens` tokens, or windows are empty."""
    if not 0 <= start <= stop <= tokens:
        raise DataError(
            f"the tokens {start} to {stop} are not a range of the corpus", found=f"{tokens} tokens"
        )
    if sequence_length < 1:
        raise DataError("a window has at least one token", found=f"{sequence_length}")
