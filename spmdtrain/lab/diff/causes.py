"""Ranks the differences between two runs by how well they explain where the results diverge.

A step reads its data and its rate, then computes a loss, gradients and an update. A difference
affects everything computed after it, and nothing before: the optimizer cannot change the loss of
the first step. So the settings that decide the first thing that differs rank highest. Placement
explains only rounding; if nothing else differs, and the results differ by more than rounding, the
layout is wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spmdtrain.lab.diff.differences import DataDifference, Other
from spmdtrain.lab.diff.meaning import Changed, Kind
from spmdtrain.lab.diff.parting import Parting

Of = Literal["setting", "data", "code", "devices", "machine"]
ORDER: tuple[Kind, ...] = get_args(Kind)
# Differences of code that change numbers; others, such as flags, may change only bits.
LIKELY_CODE = ("parts from Python", "code of the model", "sources of spmdtrain")


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference: its sort, and a name, such as that of a setting."""

    of: Of
    name: str


@dataclass(frozen=True)
class RunDifferences:
    """All differences between two runs but those of their results."""

    settings: Sequence[Changed]
    code: Sequence[Other]
    places: Sequence[Other]
    data: DataDifference


def evidence(parting: Parting, first_step: int) -> Kind:
    """Returns the part of a step that differed first; what decides it is the likeliest cause."""
    if parting.in_figure == "tokens":
        return "data"
    beyond = parting.beyond or parting.first or first_step
    if parting.rate is not None and parting.rate <= beyond:
        return "rate"
    if beyond == first_step:
        return "gradient" if parting.in_figure == "grad_norm" else "loss"
    return "update"


def causes(differences: RunDifferences, parting: Parting, first_step: int) -> list[Cause]:
    """Returns the possible causes, likeliest first; none if the runs are bit-equal.

    `first_step` is the first step that both runs have taken.
    """
    if parting.verdict == "identical":
        return []
    numbers = [
        setting for setting in differences.settings if setting.decides not in ("placement", "none")
    ]
    places = [setting for setting in differences.settings if setting.decides == "placement"]
    kind = evidence(parting, first_step)
    ranks = {setting.name: _rank(setting, numbers, kind) for setting in numbers}
    numbers.sort(key=lambda setting: ranks[setting.name])
    data = []
    if differences.data.step is not None and not any(
        setting.decides == "data" for setting in numbers
    ):
        data = [Cause("data", "the corpus")]
    likely = [difference for difference in differences.code if difference.what in LIKELY_CODE]
    others = [difference for difference in differences.code if difference.what not in LIKELY_CODE]
    ranked = [
        *data,
        *(Cause("setting", setting.name) for setting in numbers),
        *_named("code", likely),
        *(Cause("setting", setting.name) for setting in places),
        *_named("code", others),
        *_named("devices", differences.places),
    ]
    if parting.verdict == "rounding":
        moves = [
            *(Cause("setting", setting.name) for setting in places),
            *_named("code", others),
            *_named("devices", differences.places),
        ]
        ranked = list(dict.fromkeys([*moves, *ranked]))
    return ranked or [Cause("machine", "the machine")]


def _named(of: Of, others: Iterable[Other]) -> list[Cause]:
    return [Cause(of, difference.what) for difference in others]


def _rank(changed: Changed, others: Sequence[Changed], kind: Kind) -> tuple[int, bool]:
    """Returns the rank of a setting among others that change numbers.

    The name of an optimizer or a model also decides the rest of its section, and its defaults.
    """
    section, _, name = changed.name.partition(".")
    if name != "name":
        return _distance(changed, kind), True
    mine = [setting for setting in others if setting.name.startswith(f"{section}.")]
    return min(_distance(setting, kind) for setting in mine), False


def _distance(changed: Changed, kind: Kind) -> int:
    """Returns how far a setting is from the part of the step that differed first."""
    decides: Kind = changed.decides
    if changed.name == "train.seed" and kind == "loss":  # a seed also draws the weights
        decides = "loss"
    apart = ORDER.index(decides) - ORDER.index(kind)
    return -apart if apart <= 0 else len(ORDER) + apart  # a later part explains nothing
