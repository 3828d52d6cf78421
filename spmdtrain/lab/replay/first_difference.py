"""Finds the first difference between a step and its record, in the order of the step.

This is the order in which a step computes things: its tokens, its loss and the other figures, then
each weight with its moments and averages, weights in the order of the backward pass. A fault shows
in everything computed after it, so the first difference is nearest to the cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint
from spmdtrain.checkpoints.meta import OF_ITEM, OPTIMIZER

FIRST_FIGURES = ("learning_rate", "tokens", "loss")  # figures that a step has before its gradients


@dataclass(frozen=True)
class Mismatch:
    """The first thing in `step` that is not as recorded.

    kind: "tokens", "figure" or "leaf"; `others` counts further differences of that kind.

    `here` and `there`: the value of the replay and that of the record, for figures.
    """

    step: int
    kind: str
    name: str
    here: Any = None
    there: Any = None
    others: int = 0

    def describe(self) -> str:
        """Returns the mismatch in words."""
        more = f", and {self.others} more" if self.others else ""
        if self.kind == "figure":
            return (
                f"step {self.step} differs: {self.name} {self.here!r}, "
                f"the run wrote {self.there!r}{more}"
            )
        if self.kind == "tokens":
            return (
                f"step {self.step} was fed other tokens: their hash is {self.here} here, and the "
                f"run wrote {self.there}"
            )
        return f"after step {self.step} {self.name} differs{more}"


def different_figures(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Returns the names of the figures that both have and that differ, in the order of a step."""
    names = [name for name in here if name in there and here[name] != there[name]]
    return sorted(names, key=lambda name: (_place_of_figure(name), name))


def _place_of_figure(name: str) -> int:
    first = name.partition("/")[0]
    return FIRST_FIGURES.index(first) if first in FIRST_FIGURES else len(FIRST_FIGURES)


def different_leaves(
    here: Mapping[str, Fingerprint], there: Mapping[str, Fingerprint], paths: Sequence[str]
) -> list[str]:
    """Returns the leaves that differ, in the order of a step.

    `paths`: those of the parameters, in the order of the forward pass.
    """
    names = [name for name in here if name in there and here[name] != there[name]]
    return sorted(names, key=lambda name: place_of_leaf(name, paths))


def place_of_leaf(name: str, paths: Sequence[str]) -> tuple[int, int, str]:
    """Returns the place of a leaf of the state in the order of a step.

    The last parameter of the forward pass is the first of the backward pass. Of one parameter the
    weight comes first, then its moments, then its averages.
    """
    kind = 0
    rest = name
    if OF_ITEM in name:
        rest, kind = name.partition(OF_ITEM)[2], 2
    elif name.startswith(OPTIMIZER):
        rest, kind = name.removeprefix(OPTIMIZER), 1
    owners = [at for at, path in enumerate(paths) if rest == path or rest.startswith(f"{path}.")]
    return (-max(owners, default=-1), kind, name)
