"""Finds the first difference between a step and its record, in the order of its computations.

These are its tokens, its loss and the other figures, then each weight with its moments and
averages, in the order of the backward pass. An error affects everything computed after it, so the
first difference is closest to the cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.checkpoints.leaves.fingerprint import Fingerprint
from spmdtrain.checkpoints.meta import OF_ITEM, OPTIMIZER

FIRST_FIGURES = (
    "learning_rate",
    "tokens",
    "loss",
)  # figures that a step computes before its gradients


@dataclass(frozen=True)
class Mismatch:
    """The first difference between `step` and its record.

    `kind` is "tokens", "figure" or "leaf", and `others` counts further differences of that kind.
    For figures, `here` is the value of the replay and `there` that of the record.
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


def different_figures(here: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Returns the common figures that differ, in the order of a step."""
    names = [name for name in here if name in recorded and here[name] != recorded[name]]
    return sorted(names, key=lambda name: (_place_of_figure(name), name))


def _place_of_figure(name: str) -> int:
    first = name.partition("/")[0]
    return FIRST_FIGURES.index(first) if first in FIRST_FIGURES else len(FIRST_FIGURES)


def different_leaves(
    here: Mapping[str, Fingerprint], recorded: Mapping[str, Fingerprint], paths: Sequence[str]
) -> list[str]:
    """Returns the common leaves that differ, in the order of a step.

    `paths` are those of the parameters, in the order of the forward pass.
    """
    names = [name for name in here if name in recorded and here[name] != recorded[name]]
    return sorted(names, key=lambda name: place_of_leaf(name, paths))


def place_of_leaf(name: str, paths: Sequence[str]) -> tuple[int, int, str]:
    """Returns the place of a leaf of the state in the order of a step.

    The last parameter of the forward pass is the first of the backward pass. A weight comes before
    its moments, and they before its averages.
    """
    kind = 0
    rest = name
    if OF_ITEM in name:
        rest, kind = name.partition(OF_ITEM)[2], 2
    elif name.startswith(OPTIMIZER):
        rest, kind = name.removeprefix(OPTIMIZER), 1
    owners = [at for at, path in enumerate(paths) if rest == path or rest.startswith(f"{path}.")]
    return (-max(owners, default=-1), kind, name)
