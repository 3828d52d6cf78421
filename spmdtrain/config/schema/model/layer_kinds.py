"""The settings that may differ between the layers of a model: their parts, the window, and rotary
positions.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

Mixer = Literal["attention", "delta", "ssd", "conv"]
Item = TypeVar("Item")


class LayerParts(NamedTuple):
    """The parts of a layer. Layers with the same parts have weights of the same shapes."""

    mixer: Mixer
    mlp: Literal["dense", "routed"]


class LayerKind(NamedTuple):
    """The settings in which one layer differs from others. Its weights have the same shapes."""

    window: int  # tokens that attention sees, itself among them; 0: all
    rope_theta: float | None  # None: queries and keys are not rotated
    is_scaled: bool  # `rope_scaling` stretches its positions


def repeated(pattern: Sequence, layers: int) -> list:
    """Returns the value of each layer: the pattern repeated, and cut at the last layer."""
    return [pattern[number % len(pattern)] for number in range(layers)]


def shortest_round(layers: Sequence[Item]) -> tuple[Item, ...]:
    """Returns the shortest beginning of `layers` that gives all of them, repeated as a whole."""
    layers = tuple(layers)
    for size in range(1, len(layers)):
        rounds, rest = divmod(len(layers), size)
        if not rest and layers[:size] * rounds == layers:
            return layers[:size]
    return layers
