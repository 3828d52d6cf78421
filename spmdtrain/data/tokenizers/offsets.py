"""Which characters of a text each token stands for."""

from typing import NamedTuple

import numpy as np


class Encoding(NamedTuple):
    """Tokens, and where in the text each of them stands, in characters."""

    ids: np.ndarray  # int32 [tokens]
    starts: np.ndarray  # int64 [tokens]
    ends: np.ndarray  # int64 [tokens], exclusive; equal to the start: it stands for no character

    def touches(self, marked: np.ndarray) -> np.ndarray:
        """Return which tokens hold a marked character, bool [tokens].

        `marked` is bool [characters]. A token that stands for no character, as the space that some
        tokenizers put first, belongs to the character after it.
        """
        if not len(marked):
            return np.zeros(len(self.ids), bool)
        before = np.concatenate([[0], np.cumsum(marked)])
        starts = np.minimum(self.starts, len(marked) - 1)
        return before[np.maximum(self.ends, starts + 1)] > before[starts]


def marks(parts: list[str], chosen: list[bool]) -> np.ndarray:
    """Return which characters of the joined parts are of a chosen one, bool [characters]."""
    return np.repeat(np.array(chosen, bool), [len(part) for part in parts])
