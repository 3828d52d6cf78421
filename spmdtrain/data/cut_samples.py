"""Cuts samples into shorter sequences, for the stages of `train.stages` that have them.

With `pieces` sequences in a sample, the sequence i is piece i % pieces of sample i // pieces. In a
batch, `sample` is then the index of the sequence. A document that begins before a piece counts from
the start of the piece, as one that begins before a sample counts from the start of the sample.
"""

from collections.abc import Callable

import numpy as np

Samples = Callable[[np.ndarray], dict[str, np.ndarray]]


def sequences_of(samples: np.ndarray, pieces: int) -> np.ndarray:
    """Returns the indices of the sequences of these samples, int64 [samples x pieces]."""
    return (samples[:, None] * pieces + np.arange(pieces)).ravel()


def in_pieces(samples: Samples, pieces: int) -> Samples:
    """Turns a function for samples into one for sequences. A call makes each sample once."""
    if pieces == 1:
        return samples

    def sequences(indices: np.ndarray) -> dict[str, np.ndarray]:
        wanted, row = np.unique(indices // pieces, return_inverse=True)
        piece = indices % pieces
        batch = {name: _cut(x, row, piece, pieces) for name, x in samples(wanted).items()}
        if "positions" in batch:
            from_start = np.arange(batch["positions"].shape[-1], dtype=np.int32)
            batch["positions"] = np.minimum(batch["positions"], from_start)
        return batch | {"sample": indices.astype(np.uint32)}

    return sequences


def _cut(x: np.ndarray, row: np.ndarray, piece: np.ndarray, pieces: int) -> np.ndarray:
    """Returns a piece of some rows of `x` [samples, time, ...], or the rows of `x` [samples]."""
    if x.ndim == 1:
        return x[row]
    length = x.shape[1] // pieces
    return x.reshape(len(x), pieces, length, *x.shape[2:])[row, piece]
