"""Relates each token to the characters of the text that it stands for."""

from typing import NamedTuple

import numpy as np


class Encoding(NamedTuple):
    """The tokens of a text and their spans in it, in characters."""

    ids: np.ndarray  # int32 [tokens]
    starts: np.ndarray  # int64 [tokens]
    ends: np.ndarray  # int64 [tokens], exclusive; equal to the start if it has no character

    def touches(self, marked: np.ndarray) -> np.ndarray:
        """Returns which tokens hold a marked character, bool [tokens].

        `marked` is bool [characters]. A token without characters, e.g. the space that some
        tokenizers prepend, belongs to the next character.
        """
        if not len(marked):
            return np.zeros(len(self.ids), bool)
        before = np.concatenate([[0], np.cumsum(marked)])
        starts = np.minimum(self.starts, len(marked) - 1)
        return before[np.maximum(self.ends, starts + 1)] > before[starts]


def marks(parts: list[str], chosen: list[bool]) -> np.ndarray:
    """Returns which characters of the joined parts are in a chosen part, bool [characters]."""
    return np.repeat(np.array(chosen, bool), [len(part) for part in parts])
