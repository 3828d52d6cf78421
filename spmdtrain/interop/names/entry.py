"""Defines an entry of a table of names: the tensors that one of our parameters is made from."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from spmdtrain.config.schema import IN_STACK
from spmdtrain.interop import pieces
from spmdtrain.interop.pieces import Rule

LAYER, EXPERT = "{}", "{x}"
OURS, FURTHER = IN_STACK, "further."
EMBED, HEAD, POSITIONS = "tokens.table_ve", "unembed_ve", "positions_te"
NORM = "norm.scale_e"  # our path of the last norm, which every family has


class Entry(NamedTuple):
    """The tensors that one of our parameters is made from, and how.

    `first`: the number, in the files, of the layer that has this parameter in the first round of
    our stack. `step`: the layers of a round.
    """

    rule: Rule
    names: tuple[str, ...]
    first: int = 0
    step: int = 1

    def of_layer(self, layer: int | None) -> tuple[str, ...]:
        """Returns the names of the tensors of the layer in one round of the stack."""
        number = None if layer is None else self.first + self.step * layer
        return tuple(name.replace(LAYER, str(number)) for name in self.names)

    def of_all(self, numbers: Sequence[int]) -> "Entry":
        """Returns the entry of a parameter that has all layers of these numbers, stacked.

        `of_experts` comes first: the experts of a layer stand side by side.
        """
        assert not any(EXPERT in name for name in self.names), self.names
        names = (name.replace(LAYER, str(number)) for number in numbers for name in self.names)
        return Entry(partial(pieces.of_each_expert, rule=self.rule), tuple(names))

    def of_experts(self, count: int) -> "Entry":
        """Returns the entry with the names of all experts, one expert after another."""
        if not any(EXPERT in name for name in self.names):
            return self
        names = (name.replace(EXPERT, str(at)) for at in range(count) for name in self.names)
        return self._replace(names=tuple(names))


Table = Mapping[str, Entry]  # by the path of our parameter
Part = Mapping[str, Entry]  # of a layer, by the path inside of it and with names inside of it


def entry(rule: Rule, *names: str) -> Entry:
    """Returns the entry of a parameter that is made from the tensors `names`."""
    return Entry(rule, names)


def in_layers(prefix: str, part: Part, place: str = "") -> dict[str, Entry]:
    """Returns the entries of a layer, with prefixes for both their names and ours.

    `place`: the path of the layer in a round, if there are several.
    """
    return {
        OURS + place + ours: Entry(entry.rule, tuple(prefix + name for name in entry.names))
        for ours, entry in part.items()
    }
