"""The settings that may differ between the layers of a model: the window, and rotary positions."""

from collections.abc import Sequence
from typing import NamedTuple


class LayerKind(NamedTuple):
    """The settings in which one layer differs from others. Its weights have the same shapes."""

    window: int  # tokens that attention sees, itself among them; 0: all
    rope_theta: float | None  # None: queries and keys are not rotated
    is_scaled: bool  # `rope_scaling` stretches its positions


def repeated(pattern: Sequence, layers: int) -> list:
    """Returns the value of each layer: the pattern repeated, and cut at the last layer."""
    return [pattern[number % len(pattern)] for number in range(layers)]
