"""Ranks what differs between two runs by how well it explains where they part.

A step is fed, has a rate, computes a loss, gradients and an update, in this order. A difference
shows in everything computed after it: the optimizer cannot change the loss of the first step. So
the settings that decide the first thing that differs come first. Placement explains only rounding;
if nothing else differs, and the results differ by more than rounding, the layout is wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spmdtrain.lab.diff.differences import DataDifference, Other
from spmdtrain.lab.diff.meaning import Changed, Kind
from spmdtrain.lab.diff.parting import Parting

Of = Literal["setting", "data", "code", "devices", "machine"]
ORDER: tuple[Kind, ...] = get_args(Kind)
# Keywords of a caller, versions and flags may change only bits, or numbers as well.
LIKELY_CODE = ("parts from Python", "code of the model", "sources of spmdtrain")


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference: `of` which sort, and its name, such as that of a
    setting.
    """

    of: Of
    name: str


@dataclass(frozen=True)
class RanOtherwise:
    """All differences between two runs other than their results."""

    settings: Sequence[Changed]
    code: Sequence[Other]
    places: Sequence[Other]
    data: DataDifference


def evidence(parting: Parting, first_step: int) -> Kind:
    """Returns the part of a step that differed first: what decides it is the likeliest cause."""
    if parting.in_figure == "tokens":
        return "data"
    beyond = parting.beyond or parting.first or first_step
    if parting.rate is not None and parting.rate <= beyond:
        return "rate"
    if beyond == first_step:
        return "gradient" if parting.in_figure == "grad_norm" else "loss"
    return "update"


def causes(found: RanOtherwise, parting: Parting, first_step: int) -> list[Cause]:
    """Returns the possible causes, likeliest first; none if all bits are equal.

    `first_step`: the first that both have taken.
    """
    if parting.verdict == "identical":
        return []
    numbers = [each for each in found.settings if each.decides not in ("placement", "none")]
    places = [each for each in found.settings if each.decides == "placement"]
    kind = evidence(parting, first_step)
    ranks = {each.name: _rank(each, numbers, kind) for each in numbers}
    numbers.sort(key=lambda each: ranks[each.name])
    data = []
    if found.data.step is not None and not any(each.decides == "data" for each in numbers):
        data = [Cause("data", "the corpus")]
    likely = [each for each in found.code if each.what in LIKELY_CODE]
    others = [each for each in found.code if each.what not in LIKELY_CODE]
    ranked = [
        *data,
        *(Cause("setting", each.name) for each in numbers),
        *_named("code", likely),
        *(Cause("setting", each.name) for each in places),
        *_named("code", others),
        *_named("devices", found.places),
    ]
    if parting.verdict == "rounding":
        moves = [
            *(Cause("setting", each.name) for each in places),
            *_named("code", others),
            *_named("devices", found.places),
        ]
        ranked = list(dict.fromkeys([*moves, *ranked]))
    return ranked or [Cause("machine", "the machine")]


def _named(of: Of, others: Iterable[Other]) -> list[Cause]:
    return [Cause(of, each.what) for each in others]


def _rank(changed: Changed, others: Sequence[Changed], kind: Kind) -> tuple[int, bool]:
    """Returns the rank of a setting among others that decide numbers.

    The name of an optimizer or a model decides the rest of its section, and its defaults.
    """
    section, _, name = changed.name.partition(".")
    if name != "name":
        return _distance(changed, kind), True
    mine = [each for each in others if each.name.startswith(f"{section}.")]
    return min(_distance(each, kind) for each in mine), False


def _distance(changed: Changed, kind: Kind) -> int:
    """Returns how far a setting is from what differed first; a seed also draws the weights."""
    decides: Kind = changed.decides
    if changed.name == "train.seed" and kind == "loss":
        decides = "loss"
    apart = ORDER.index(decides) - ORDER.index(kind)
    return -apart if apart <= 0 else len(ORDER) + apart  # what comes later explains nothing
