"""The settings that may differ between the layers of a model (their parts, the window, and rotary
positions), and the stacks in which layers of the same parts repeat.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, TypeVar

Mixer = Literal["attention", "delta", "ssd", "conv", "both", "none"]
LayerMlp = Literal["mlp", "experts", "none"]
Item = TypeVar("Item", bound=Hashable)
FIRST = "first_blocks"  # the attribute of a model that runs its first dense layers
BLOCKS = "blocks"  # the attribute that runs all others
IN_STACK = BLOCKS + ".layer."  # begins the paths of what the stages of a pipeline share out


class LayerParts(NamedTuple):
    """The parts of a layer. Layers with the same parts have weights of the same shapes."""

    mixer: Mixer
    mlp: LayerMlp
    is_full: bool = False  # its attention is that of [model.full]
    shares_keys: bool = False  # it reads the keys and values of an earlier layer

    @property
    def parts(self) -> int:
        """The parts that the layer adds to the stream: two, or the one that it has."""
        return (self.mixer != "none") + (self.mlp != "none")


class LayerKind(NamedTuple):
    """The settings in which one layer differs from others. Its weights have the same shapes."""

    window: int  # tokens that attention sees, itself among them; 0: all
    rope_theta: float | None  # None: queries and keys are not rotated
    is_scaled: bool  # `rope_scaling` stretches its positions
    chunk: int = 0  # tokens of a block that attention does not leave; 0: none


def singles_of(mixer: Mixer) -> tuple[Mixer, ...]:
    """Returns the mixers that a layer runs on its input: one, the two of "both", or none."""
    if mixer == "none":
        return ()
    return ("attention", "ssd") if mixer == "both" else (mixer,)


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


class LayerStack(NamedTuple):
    """A number of `rounds` of the layers in `pattern`, which begin with layer `first`.

    `path` is that of the module that runs them.
    """

    path: str
    first: int
    pattern: tuple[LayerParts, ...]
    rounds: int

    @property
    def layers(self) -> int:
        """The number of layers of all rounds."""
        return self.rounds * len(self.pattern)


def stacks_of(layers: Sequence[LayerParts], first_dense: int) -> tuple[LayerStack, ...]:
    """Returns the stacks of a model's layers, of which the first dense ones are a stack.

    The others are one stack if a round shorter than they are repeats as a whole: pipelines need
    that. Else they are segments, each with rounds of its own, whose patterns have as few layers in
    all as possible: a compiler sees each layer of a pattern.
    """
    stacks = []
    if first_dense:
        pattern = shortest_round(layers[:first_dense])
        stacks.append(LayerStack(FIRST, 0, pattern, first_dense // len(pattern)))
    segments = _segments_of(layers[first_dense:])
    start = first_dense
    for number, (pattern, rounds) in enumerate(segments):
        path = f"{BLOCKS}.segment.{number}" if len(segments) > 1 else BLOCKS
        stacks.append(LayerStack(path, start, pattern, rounds))
        start += stacks[-1].layers
    return tuple(stacks)


def _segments_of(layers: Sequence[Item]) -> Sequence[tuple[tuple[Item, ...], int]]:
    """Returns (pattern, rounds) of the stacks of these layers."""
    pattern = shortest_round(layers)
    if len(pattern) < max(len(layers), 2):
        return ((pattern, len(layers) // len(pattern)),)
    from spmdtrain.config.schema.model.segments import shortest_segments

    return shortest_segments(pattern)
